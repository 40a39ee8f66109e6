"""Annotation files as their tools write them, and files that are broken or hostile."""

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import zarr

from lightning_plugin import Box
from wsi_trainer.errors import UserError
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.regions.target import IGNORED, Legend, open_target
from wsi_trainer.slide.geometry import SlideTransform

CAMELYON = """<?xml version="1.0"?>
<ASAP_Annotations>
	<Annotations>
		<Annotation Name="Annotation 0" Type="Polygon" PartOfGroup="Tumor" Color="#F4FA58">
			<Coordinates>
				<Coordinate Order="0" X="10" Y="10" />
				<Coordinate Order="2" X="50.5" Y="40.25" />
				<Coordinate Order="1" X="50.5" Y="10" />
				<Coordinate Order="3" X="10" Y="40.25" />
			</Coordinates>
		</Annotation>
		<Annotation Name="_1" Type="Spline" PartOfGroup="Exclusion" Color="#64FE2E">
			<Coordinates>
				<Coordinate Order="0" X="20" Y="20" />
				<Coordinate Order="1" X="30" Y="20" />
				<Coordinate Order="2" X="25" Y="30" />
			</Coordinates>
		</Annotation>
		<Annotation Name="point" Type="Dot" PartOfGroup="None" Color="#64FE2E">
			<Coordinates><Coordinate Order="0" X="1" Y="1" /></Coordinates>
		</Annotation>
	</Annotations>
	<AnnotationGroups>
		<Group Name="Tumor" PartOfGroup="None" Color="#ff0000"><Attributes /></Group>
		<Group Name="Exclusion" PartOfGroup="None" Color="#00ff00"><Attributes /></Group>
	</AnnotationGroups>
</ASAP_Annotations>
"""
"""After the schema of ASAP's files, which CAMELYON16 and CAMELYON17 use."""

IMAGESCOPE = """<Annotations MicronsPerPixel="0.25">
  <Annotation Id="1" Name="Tumour" LineColor="65280"><Regions>
    <RegionAttributeHeaders><AttributeHeader Id="9999" Name="Region" ColumnWidth="-1" /></RegionAttributeHeaders>
    <Region Id="1" Type="0" NegativeROA="0"><Vertices>
      <Vertex X="0" Y="0" Z="0" /><Vertex X="40" Y="0" Z="0" /><Vertex X="40" Y="40" Z="0" />
      <Vertex X="0" Y="40" Z="0" />
    </Vertices></Region>
    <Region Id="2" Type="4" NegativeROA="0"><Vertices><Vertex X="0" Y="0" /><Vertex X="9" Y="9" /></Vertices></Region>
    <Region Id="3" Type="0" NegativeROA="1"><Vertices>
      <Vertex X="10" Y="10" /><Vertex X="20" Y="10" /><Vertex X="20" Y="20" /><Vertex X="10" Y="20" />
    </Vertices></Region>
  </Regions></Annotation>
</Annotations>
"""

HALO = """<Annotations><Annotation LineColor="65535" Name="Tumour" Visible="True"><Regions>
  <Region Type="Polygon" HasEndcaps="0" NegativeROA="0"><Vertices>
    <V X="1" Y="2" /><V X="30" Y="2" /><V X="30" Y="20" /></Vertices><Comments /></Region>
</Regions></Annotation></Annotations>
"""

QUPATH = {
    "type": "FeatureCollection",
    "features": [
        {
            "type": "Feature",
            "id": "7aae8b66-0b8d-4b8c-a7d6-8a5d7f1e2c11",
            "geometry": {
                "type": "Polygon",
                "coordinates": [
                    [[0, 0], [40, 0], [40, 30], [0, 30], [0, 0]],
                    [[10, 10], [20, 10], [20, 20], [10, 20], [10, 10]],
                ],
            },
            "properties": {
                "objectType": "annotation",
                "classification": {"name": "Tumor", "color": [200, 0, 0]},
                "isLocked": True,
            },
        },
        {
            "type": "Feature",
            "geometry": {"type": "Point", "coordinates": [3, 3]},
            "properties": {"objectType": "annotation"},
        },
        {
            "type": "Feature",
            "geometry": {
                "type": "MultiPolygon",
                "coordinates": [[[[50, 0, 1], [60, 0, 1], [60, 9, 1]]], [[[50, 20], [60, 20], [60, 29]]]],
            },
            "properties": {"objectType": "annotation", "classification": {"names": ["Stroma", "Positive"]}},
        },
    ],
}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_camelyon(tmp_path: Path) -> None:
    tumour, exclusion = read_regions(write(tmp_path / "tumor_001.xml", CAMELYON))
    assert (tumour.name, exclusion.name) == ("Tumor", "Exclusion")
    assert tumour.rings[0].tolist() == [[10, 10], [50.5, 10], [50.5, 40.25], [10, 40.25]]
    assert exclusion.rings[0].tolist() == [[20, 20], [30, 20], [25, 30]]
    legend = Legend.of(["normal", "tumour"], {"Tumor": "tumour", "Exclusion": "normal"}, None)
    slide = write(tmp_path / "slide.tif", "")
    values = open_target(tmp_path / "tumor_001.xml", legend, slide, (60, 60), SlideTransform((60, 60))).read(
        Box.whole((60, 60))
    )
    # Centres from 10.5 to 49.5 in x (50.5 is the edge) and from 10.5 to 39.5 in y, less a triangle of 50 pixels.
    assert int((values == 1).sum()) == 40 * 30 - 50


@pytest.mark.parametrize(("text", "names"), [(IMAGESCOPE, ["Tumour", "Tumour"]), (HALO, ["Tumour"])])
def test_layers_of_imagescope_and_halo(tmp_path: Path, text: str, names: list[str]) -> None:
    path = write(tmp_path / "a.xml", text)
    assert [region.name for region in read_regions(path)] == names
    if text is IMAGESCOPE:
        legend = Legend.of(["normal", "Tumour"], {"Tumour": "Tumour"}, None)
        target = open_target(path, legend, write(tmp_path / "slide.tif", ""), (50, 50), SlideTransform((50, 50)))
        assert int(target.read(Box.whole((50, 50))).sum()) == 1600 - 100


@pytest.mark.parametrize("shape", ["collection", "list", "feature"])
def test_qupath(tmp_path: Path, shape: str) -> None:
    content = {"collection": QUPATH, "list": QUPATH["features"], "feature": QUPATH["features"][0]}[shape]
    found = read_regions(write(tmp_path / "a.geojson", json.dumps(content)))
    assert [region.name for region in found] == ["Tumor", "Stroma: Positive", "Stroma: Positive"][: len(found)]
    assert len(found[0].rings) == 2 and found[0].bounds == (0, 0, 40, 30)


def test_a_class_that_the_task_does_not_know_is_named(tmp_path: Path) -> None:
    path, slide = write(tmp_path / "a.geojson", json.dumps(QUPATH)), write(tmp_path / "slide.tif", "")
    with pytest.raises(UserError, match=r"a\.geojson.*'Stroma: Positive'.*model\.task\.init_args\.drawn"):
        open_target(path, Legend.of(["normal", "Tumor"], None, None), slide, (50, 50), SlideTransform((50, 50)))


@pytest.mark.parametrize(
    ("far", "message"),
    [([5000], "none of its 1 outlines touches the slide, which has 50 x 60 px"), ([5000, 5, -5000], "")],
)
def test_outlines_of_another_slide_are_refused_and_some_outside_of_it_told(
    tmp_path: Path, far: list[int], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    corners = [[[[x, 5], [x + 30, 5], [x + 30, 35]]] for x in far]
    path = write(tmp_path / "a.geojson", json.dumps([{"type": "Polygon", "coordinates": one} for one in corners]))
    legend, place = Legend.of(["normal", "tumour"], {"": "tumour"}, None), SlideTransform((60, 50), scale=(2.0, 2.0))
    slide = write(tmp_path / "slide.tif", "")
    for _ in range(2):
        if message:
            with pytest.raises(UserError, match=rf"a\.geojson: {message}"):
                open_target(path, legend, slide, (30, 25), place)
        else:
            assert open_target(path, legend, slide, (30, 25), place).read(Box.whole((30, 25))).any()
    assert caplog.messages == ([] if message else [f"{path}: 2 of its 3 outlines lie outside of the slide"])


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.geojson", '{"type": "Point", "coordinates": [1, 2]}', 1),
        ("a.geojson", '[{"type": "LineString", "coordinates": []}, {"type": "MultiPoint", "coordinates": []}]', 2),
        ("a.xml", CAMELYON, 1),
        ("a.xml", HALO.replace("Polygon", "Ruler"), 1),
    ],
)
def test_what_covers_no_pixel_is_told(
    tmp_path: Path, name: str, text: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / name, text)
    regions = read_regions(path)
    told = f"{path}: passes over {count} points or lines, which cover no pixel; draw a lesion as a polygon"
    assert told in caplog.messages
    assert len(regions) == (2 if text is CAMELYON else 0)


def test_nothing_drawn_is_the_ground(tmp_path: Path) -> None:
    slide = write(tmp_path / "slide.tif", "")
    for unmarked, value in (("normal", 0), ("ignore", IGNORED)):
        target = open_target(
            None, Legend.of(["normal", "tumour"], None, unmarked), slide, (20, 30), SlideTransform((20, 30))
        )
        assert target.shape == (1, 1, 20, 30) and target.constant(Box.whole((20, 30))) == value


LAUGHS = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><ASAP_Annotations>&b;</ASAP_Annotations>'
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><ASAP_Annotations>&a;</ASAP_Annotations>'
CORNER = (
    '<ASAP_Annotations><Annotation Type="Polygon"><Coordinate Order="0" X="{}" Y="1"/></Annotation></ASAP_Annotations>'
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.xml", LAUGHS, "declares entities"),
        ("a.xml", OUTSIDE, "declares entities"),
        ("a.xml", "<html></html>", "begins with <html>"),
        ("a.xml", CAMELYON[:500], "no whole XML file"),
        ("a.xml", "", "no whole XML file"),
        ("a.xml", CORNER.format("1"), "an outline has 1 corners"),
        ("a.xml", CORNER.format("nowhere"), "no pair of numbers"),
        ("a.xml", CORNER.replace("X=", "Z=").format("1"), "corner without a number"),
        ("a.xml", HALO.replace("Polygon", "Ellipse"), "draw it as a polygon"),
        ("a.geojson", "{", "not GeoJSON"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[[0, 0], [1, NaN], [1, 1]]]}', "beyond any slide"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[[0, 0], [1e300, 1], [1, 1]]]}', "beyond any slide"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[[0], [1], [2]]]}', "3 or more"),
        ("a.geojson", '{"type": "Circle", "coordinates": []}', "'Circle'"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[]]}', "an outline has 0 corners"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[["a", 0], [1, 1], [2, 2]]]}', "no pair of numbers"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[0, 0], [9, 0], [9, 9]]}', "no pair of numbers"),
        ("a.geojson", '{"type": "Polygon", "coordinates": "x"}', "no pair of numbers"),
        ("a.geojson", '{"type": "FeatureCollection", "features": null}', "not GeoJSON"),
        ("a.geojson", "null", "not GeoJSON .*'None' where a feature or a geometry is expected"),
        ("a.geojson", '["x"]', "not GeoJSON .*'x' where a feature or a geometry is expected"),
        ("a.geojson", "{}", "not GeoJSON .*a part of it has no 'type'"),
        ("a.geojson", '{"type": "FeatureCollection"}', "not GeoJSON .*a part of it has no 'features'"),
        ("a.geojson", "[" * 100_000, "not GeoJSON"),
        ("a.csv", "", "ends? in"),
    ],
)  # fmt: skip
def test_what_is_broken_is_one_line_that_names_the_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_regions(write(tmp_path / name, text))
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["tif", "zarr", "small tif", "small zarr"])
def test_label_images_are_read_where_they_lie(tmp_path: Path, kind: str) -> None:
    shrink = 4 if kind.startswith("small") else 1
    labels = np.random.default_rng(0).integers(0, 3, (96 // shrink, 128 // shrink)).astype(np.uint8)
    path = tmp_path / f"mask.{kind.split()[-1]}"
    if path.suffix == ".tif":
        tifffile.imwrite(path, labels, tile=(16, 16), compression="zlib")
    else:
        group = zarr.open_group(path, mode="w")
        group.create_array("s0", data=labels)
        group.attrs["ome"] = {"multiscales": [{"datasets": [{"path": "s0"}]}]}
    legend = Legend.of(["normal", "tumour", "fat"], {"1": "fat", "2": "tumour"}, None)
    slide = write(tmp_path / "slide.tif", "")
    full = np.array([0, 2, 1])[labels.repeat(shrink, 0).repeat(shrink, 1)]
    target = open_target(path, legend, slide, (96, 128), SlideTransform((96, 128)))
    assert np.array_equal(target.read(Box((5, 7), (90, 101)))[0, 0], full[5:90, 7:101])
    if shrink == 1:  # the image shrunk by two: the label of each pixel's centre
        half = open_target(path, legend, slide, (48, 64), SlideTransform((96, 128)).coarser(2))
        assert np.array_equal(half.read(Box((3, 4), (40, 60)))[0, 0], full[7:80:2, 9:120:2])
    with pytest.raises(UserError, match="has the label 2"):
        few = open_target(
            path, Legend.of(["normal", "fat"], {"1": "fat"}, None), slide, (96, 128), SlideTransform((96, 128))
        )
        few.read(Box.whole((96, 128)))
    with pytest.raises(UserError, match="a whole number of times"):
        open_target(path, legend, slide, (150, 128), SlideTransform((150, 128)))
    assert torch.uint8 == target.dtype


def test_a_label_image_that_is_closed_holds_no_file(tmp_path: Path) -> None:
    """A run opens one for each slide of each epoch: what Python collects some day does not count."""
    path, slide = tmp_path / "label.tif", write(tmp_path / "slide.tif", "")
    tifffile.imwrite(path, np.arange(50 * 50, dtype=np.uint8).reshape(50, 50) % 2, tile=(16, 16), compression="zlib")
    legend, box = Legend(("a", "b"), {"0": "a", "1": "b"}, "a"), Box((3, 5), (40, 45))

    def held() -> int:
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return sum(link.is_symlink() and link.readlink() == path for link in links)

    gc.disable()
    try:
        for _ in range(5):
            source = open_target(path, legend, slide, (50, 50), SlideTransform((50, 50)))
            values = source.read(box)
            assert held() == 1
            source.close()
            assert held() == 0
        assert torch.equal(source.read(box), values), "it is opened again where it is read again"
        source.close()
    finally:
        gc.enable()
