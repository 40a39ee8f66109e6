"""What is more than one image of 8 bits is refused or converted by name, never cut in silence (S5, S6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.slide.formats.base import Range, ReadOptions
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.chunks import StoredLevel
from wsi_trainer.store.convert import Job, Settings, convert

SIZE = (96, 128)
TILE = {"tile": (32, 32)}
GREY = {"photometric": "minisblack", **TILE}
OME = {"ome": True, **GREY}


def _values(*shape: int, dtype: str = "uint8") -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(1).integers(info.min, info.max, shape, dtype, endpoint=True)


REFUSED: dict[str, tuple[np.ndarray, dict[str, Any], str]] = {
    "16-bit RGB": (_values(*SIZE, 3, dtype="uint16"), {"photometric": "rgb", **TILE}, "uint16.*--to_8bit"),
    "signed": (_values(*SIZE, dtype="int8"), GREY, "int8.*--to_8bit"),
    "2 channels": (_values(*SIZE, 2), {"planarconfig": "contig", **GREY}, "2 channels.*--channel"),
    "5 channels": (_values(*SIZE, 5), {"planarconfig": "contig", **GREY}, "5 channels.*--channel"),
    "5 planes": (_values(5, *SIZE), {"planarconfig": "separate", **GREY}, "5 channels.*--channel"),
    "3 channels that are no RGB": (_values(*SIZE, 3), {"planarconfig": "contig", **GREY}, "3 channels.*--channel"),
    "2 pages": (_values(2, *SIZE, 3), {"photometric": "rgb", **TILE}, "2 pages.*--channel"),
    "OME, 5 channels of 16 bit": (
        _values(5, *SIZE, dtype="uint16"),
        {"metadata": {"axes": "CYX", "Channel": {"Name": ["DAPI", "CD3", "CD8", "PanCK", "AF"]}}, **OME},
        "5 channels.*'PanCK'",
    ),
    "OME, 3 channels": (_values(3, *SIZE), {"metadata": {"axes": "CYX"}, **OME}, "3 channels.*--channel"),
    "OME, z-stack": (_values(4, *SIZE), {"metadata": {"axes": "ZYX"}, **OME}, "stack of 4 planes"),
    "OME, z-stack of channels": (_values(4, 2, *SIZE), {"metadata": {"axes": "ZCYX"}, **OME}, "stack of 8 planes"),
    "OME, times": (_values(4, *SIZE), {"metadata": {"axes": "TYX"}, **OME}, "stack of 4 planes"),
    "float": (_values(*SIZE).astype("float32"), GREY, "float32.*--to_8bit"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("layout", ["tiled", "striped"])
def test_refused_for_its_reason(tmp_path: Path, kind: str, layout: str) -> None:
    data, options, reason = REFUSED[kind]
    if layout == "striped":
        options = {key: value for key, value in options.items() if key != "tile"}
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, data, **options)
    with pytest.raises(SlideError, match=reason):
        Slide.open(path)


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("number", [0, 3])
def test_channel_by_number_of_samples(tmp_path: Path, planar: str, number: int) -> None:
    data = _values(*SIZE, 5)
    stored = data if planar == "contig" else np.moveaxis(data, 2, 0)
    tifffile.imwrite(tmp_path / "s.tif", stored, planarconfig=planar, **GREY)
    with Slide.open(tmp_path / "s.tif", options=ReadOptions(str(number))) as reader:
        expected = np.repeat(data[..., number : number + 1], 3, 2)
        assert np.array_equal(reader.read(0, 0, 0, *SIZE), expected)
        assert reader.info.changes == (f"channel {number} of 5",)


def _pyramid(path: Path, data: np.ndarray) -> None:
    metadata = {"axes": "CYX", "Channel": {"Name": ["DAPI", "CD3", "CD8"]}}
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(data, subifds=1, metadata=metadata, **GREY)
        writer.write(data[:, ::2, ::2], subfiletype=1, **GREY)


@pytest.mark.parametrize("wanted", ["CD8", "cd8", "2"])
def test_channel_by_name_of_an_ome_pyramid(tmp_path: Path, wanted: str) -> None:
    data = _values(3, *SIZE, dtype="uint16")
    _pyramid(tmp_path / "s.ome.tif", data)
    options = ReadOptions(wanted, Range(1000, 40000))
    with Slide.open(tmp_path / "s.ome.tif", options=options) as reader:
        expected = np.rint(np.clip((data[2].astype(float) - 1000) / 39000, 0, 1) * 255).astype(np.uint8)
        assert np.array_equal(reader.read(0, 0, 0, *SIZE)[..., 1], expected)
        assert np.array_equal(reader.read(1, 0, 0, 48, 64)[..., 0], expected[::2, ::2])
        assert reader.info.changes == (f"channel {wanted} of 3", "uint16 1000:40000 to 8 bits")


@pytest.mark.parametrize("wanted", ["3", "-1", "CD4", "", "1.0"])
def test_channel_that_is_not_there(tmp_path: Path, wanted: str) -> None:
    _pyramid(tmp_path / "s.ome.tif", _values(3, *SIZE))
    with pytest.raises(SlideError, match=r"no channel .* can be 0 to 2 or 'DAPI', 'CD3', 'CD8'"):
        Slide.open(tmp_path / "s.ome.tif", options=ReadOptions(wanted))


@pytest.mark.parametrize(
    ("data", "given", "expected"),
    [
        (np.array([0, 100, 2048, 4095, 65535], "uint16"), "0:4095", [0, 6, 128, 255, 255]),
        (np.array([-128, 0, 127], "int8"), "-128:127", [0, 128, 255]),
        (np.array([0.0, 0.5, 1.0, 2.0, np.nan, np.inf], "float32"), "0:1", [0, 128, 255, 255, 0, 255]),
    ],
)
def test_stated_range(tmp_path: Path, data: np.ndarray, given: str, expected: list[int]) -> None:
    tifffile.imwrite(tmp_path / "s.tif", np.tile(data, (32, 8)), **GREY)
    with Slide.open(tmp_path / "s.tif", options=ReadOptions(to_8bit=Range.parse(given))) as reader:
        assert reader.read(0, 0, 0, 1, data.size)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("text", ["0", "1:0", "a:b", "0:inf", "nan:1", "0-255", "", "0:1:2", "5:5"])
def test_range_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match="expected LOW:HIGH"):
        Settings(to_8bit=text)


def test_zarr_of_channels_by_name(tmp_path: Path) -> None:
    data = _values(4, *SIZE, dtype="uint16")
    root = zarr.open_group(tmp_path / "s.zarr", mode="w", zarr_format=2)
    root.create_array("0", data=data, chunks=(1, 32, 32))
    axes = [{"name": "c", "type": "channel"}] + [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"]
    steps = [{"type": "scale", "scale": [1, 0.5, 0.5]}]
    datasets = [{"path": "0", "coordinateTransformations": steps}]
    root.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    root.attrs["omero"] = {"channels": [{"label": n} for n in ("DAPI", "CD3", "CD8", "AF")]}
    with pytest.raises(SlideError, match=r"uint16.*--to_8bit"):
        Slide.open(tmp_path / "s.zarr")
    with pytest.raises(SlideError, match=r"4 channels.*'AF'"):
        Slide.open(tmp_path / "s.zarr", options=ReadOptions(to_8bit=Range(0, 65535)))
    with Slide.open(tmp_path / "s.zarr", options=ReadOptions("AF", Range(0, 65535))) as reader:
        assert np.array_equal(reader.read(0, 0, 0, *SIZE)[..., 2], np.rint(data[3] / 257).astype(np.uint8))


def _transparent() -> np.ndarray:
    data = _values(*SIZE, 4)
    data[:48, :, 3] = 255
    data[48:, :64, 3] = 0
    return data


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_transparent_is_background_as_openslide_paints_it(tmp_path: Path, planar: str) -> None:
    data = _transparent()
    path = tmp_path / "s.tif"
    stored = data if planar == "contig" else np.moveaxis(data, 2, 0)
    tifffile.imwrite(path, stored, photometric="rgb", planarconfig=planar, extrasamples=["unassalpha"], **TILE)
    with Slide.open(path) as fast:
        found = fast.read(0, 0, 0, *SIZE)
        assert type(fast._reader).__name__ == "TiffReader"
        assert fast.info.changes == ("transparent parts in the background's colour",)
    assert np.array_equal(found[:48], data[:48, :, :3])
    assert (found[48:, :64] == 255).all()
    if planar == "contig":
        with Slide.open(path, "openslide") as slow:
            other = slow.read(0, 0, 0, *SIZE)
        assert np.array_equal(found[48:, :64], other[48:, :64])
        # Half-transparent pixels are premultiplied and divided again in OpenSlide, which costs a level or two.
        assert np.abs(found.astype(int) - other).max() <= 2


def test_largest_image_is_not_left_out(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "s.tif") as writer:
        writer.write(_values(64, 64, 3), photometric="rgb", **TILE)
        writer.write(_values(*SIZE, 3), photometric="rgb", **TILE)
    with pytest.raises(SlideError, match="image 2 is larger than the first"):
        Slide.open(tmp_path / "s.tif")


def test_part_of_an_image_is_not_taken_for_it(tmp_path: Path) -> None:
    """Two channels, of which one lies in another file."""
    data = "".join(
        f'<TiffData FirstC="{c}" IFD="0"><UUID FileName="{c}.ome.tif">urn:uuid:{c}</UUID></TiffData>' for c in (0, 1)
    )
    sizes = f'Type="uint8" SizeX="{SIZE[1]}" SizeY="{SIZE[0]}" SizeC="2" SizeZ="1" SizeT="1"'
    xml = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        f'<Pixels ID="Pixels:0" DimensionOrder="XYCZT" {sizes}>{data}</Pixels></Image></OME>'
    )
    tifffile.imwrite(tmp_path / "0.ome.tif", _values(*SIZE), description=xml, metadata=None, **GREY)
    with pytest.raises(SlideError, match=r"a part of an image: .* lie in '1\.ome\.tif'"):
        Slide.open(tmp_path / "0.ome.tif")


def test_further_images_are_told(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "s.tif") as writer:
        writer.write(_values(*SIZE, 3), photometric="rgb", resolution=(2, 2), resolutionunit="MICROMETER", **TILE)
        writer.write(_values(50, 50, 3), photometric="rgb")
    with Slide.open(tmp_path / "s.tif") as reader:
        assert reader.info.notes == ("the file holds 1 further images, which are not read",)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_as_it_is_meant_to_be_seen(tmp_path: Path, orientation: int) -> None:
    """Pillow turns a picture of the same pixels by the same number of Exif."""
    from PIL import Image, ImageOps

    data = _values(*SIZE, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(data).save(tmp_path / "s.png", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "s.png")))
    extra = [(274, "H", 1, orientation, True)]
    size = {"resolution": (20000, 40000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(tmp_path / "s.tif", data, photometric="rgb", extratags=extra, **size, **TILE)
    with Slide.open(tmp_path / "s.tif") as reader, Slide.open(tmp_path / "s.png") as picture:
        assert reader.info.shape == picture.info.shape == expected.shape[:2]
        assert np.array_equal(reader.read(0, 0, 0, *reader.info.shape), expected)
        assert np.array_equal(picture.read(0, 0, 0, *reader.info.shape), expected)
        around = reader.read(0, -3, 7, 60, 50)
        assert np.array_equal(around[3:], expected[:57, 7:57])
        assert (around[:3] == 255).all()
        assert reader.info.mpp == ((0.25, 0.5) if orientation < 5 else (0.5, 0.25))


# -- what the store says of it


def _provenance(store: Path) -> dict[str, Any]:
    return json.loads((store / "zarr.json").read_text())["attributes"]["wsi_trainer"]


SETTINGS = {"source_mpp": 0.5, "tissue": "none", "chunk": 64, "shard": 128}
EXACT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, []),
    "filtered": ({"mpp": 1.0}, ["filtered to 1.0 µm a pixel"]),
    "painted": ({"tissue": "otsu", "background": "constant"}, ["background painted in one colour"]),
}


@pytest.mark.parametrize("kind", EXACT)
def test_exact_is_what_was_compared(slide: Path, tmp_path: Path, kind: str) -> None:
    given, changes = EXACT[kind]
    convert(Job(slide, "s"), tmp_path, Settings(**{**SETTINGS, **given}))
    found = _provenance(tmp_path / "s.zarr")
    assert found["changes"] == changes
    assert found["exact"] is (not changes)
    assert (found["compared"]["pixels"] > 0) is (not changes)


def test_pixels_that_came_out_otherwise_are_found(slide: Path, tmp_path: Path, monkeypatch) -> None:
    """A store whose pixels are not the slide's does not get its name, and the next run begins anew."""
    good = StoredLevel.read
    monkeypatch.setattr(StoredLevel, "read", lambda *args: good(*args) ^ 1)
    with pytest.raises(SlideError, match="other pixels than the slide"):
        convert(Job(slide, "s"), tmp_path, Settings(**SETTINGS))
    assert not (tmp_path / "s.zarr").exists()
    monkeypatch.undo()
    convert(Job(slide, "s"), tmp_path, Settings(**SETTINGS))
    assert _provenance(tmp_path / "s.zarr")["exact"]


@pytest.mark.parametrize("kind", ["assocalpha", "unspecified"])
def test_premultiplied_transparency(tmp_path: Path, kind: str) -> None:
    data = _transparent()
    data[..., :3] = data[..., :3].astype(int) * data[..., 3:] // 255
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, data, photometric="rgb", extrasamples=[kind], **TILE)
    with Slide.open(path) as fast, Slide.open(path, "openslide") as slow:
        found, other = fast.read(0, 0, 0, *SIZE), slow.read(0, 0, 0, *SIZE)
    assert (found[48:, :64] == 255).all()
    assert np.abs(found.astype(int) - other).max() <= 2


def test_fourth_channel_that_is_no_transparency(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "s.tif", _values(*SIZE, 4), photometric="rgb", extrasamples=["unspecified"], **TILE)
    with Slide.open(tmp_path / "s.tif") as reader, pytest.raises(SlideError, match="fourth channel"):
        reader.read(0, 0, 0, *SIZE)
