"""The patches of a bag are those that the settings mean, and what is wrong with them is said in one line."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_plugin import Box
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.patches import PatchConfig, open_bag, over_tissue
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.slide.geometry import Resolution
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slides") / "a.tif"
    write_slide(path, SlideSpec(900, 700, seed=4, tissue=0.3))
    return path


@pytest.fixture(scope="module")
def store(slide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stores")
    convert(Job(slide, "a"), out, Settings(chunk=64, shard=256, background="constant"))
    return out / "a.zarr"


def bag(path: Path, **config: Any) -> Any:
    return open_bag(Slide.open(path), PatchConfig(**config))


def corners(source: Any) -> set[tuple[int, int]]:
    return set(map(tuple, source.positions.tolist()))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_grid_over_tissue_is_what_counting_pixel_by_pixel_finds(data: st.DataObject) -> None:
    scale = data.draw(st.integers(1, 7))
    height, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    rows, columns = max(1, height // scale), max(1, width // scale)  # may be a pixel short, as masks are
    bits = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    mask = TissueMask(np.array(bits).reshape(rows, columns), scale)
    size, stride = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    share = data.draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
    expected = []
    for y in range(height):
        for x in range(width):
            if y % stride or x % stride or y + size > height or x + size > width:
                continue
            tissue = 0
            for row in range(y, y + size):
                for column in range(x, x + size):
                    tissue += bits[min(row // scale, rows - 1) * columns + min(column // scale, columns - 1)]
            if tissue and Fraction(tissue, size * size) >= Fraction(str(share)):
                expected.append([y, x])
    assert over_tissue(mask, (height, width), size, stride, share).tolist() == expected


def test_patches_of_a_store_lie_on_its_tissue(store: Path) -> None:
    source = bag(store, size=48, min_tissue=0.25)
    label = zarr.open_array(store / "labels" / "tissue" / "0", mode="r")[:]
    shares = {
        (y, x): label[y : y + 48, x : x + 48].mean() for y in range(0, 900 - 47, 48) for x in range(0, 700 - 47, 48)
    }
    assert corners(source) == {corner for corner, share in shares.items() if share >= 0.25} != set()
    everything = bag(store, size=48, over="slide")
    assert corners(everything) == set(shares)
    overlapping = bag(store, size=48, stride=24)
    assert corners(source) < corners(overlapping)
    pixels = zarr.open_array(store / "0", mode="r")[:]
    y, x = source.positions[3]
    assert torch.equal(source.read(Box((3, 0, 0), (4, 48, 48)))[0], torch.from_numpy(pixels[:, y : y + 48, x : x + 48]))


def test_a_coarser_resolution_is_a_level_of_the_store_or_the_slide_filtered_down(slide: Path, store: Path) -> None:
    for path in (slide, store):
        source = bag(path, size=32, mpp=1.0, over="slide")
        assert source.shape == (14 * 10, 3, 32, 32)
    assert bag(store, size=32, mpp=0.505).resolution == Resolution(0.5, 0.5, "store")
    assert bag(store, size=32, mpp=0.7, over="slide").shape[0] == bag(slide, size=32, mpp=0.7, over="slide").shape[0]
    with pytest.raises(SlideError, match=r"finer and would invent pixels; set data\.patches\.mpp"):
        bag(slide, mpp=0.25)


def test_a_slide_that_does_not_say_its_resolution(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "x.png"
    Image.fromarray(np.full((300, 300, 3), 128, np.uint8)).save(path)
    with pytest.raises(SlideError, match="add a column mpp to the manifest"):
        bag(path, size=64, over="slide")
    assert open_bag(Slide.open(path, mpp=0.5), PatchConfig(size=64, over="slide")).shape[0] == 16
    assert bag(path, size=64, over="slide", mpp="own").shape[0] == 16


def test_glass_alone_and_slides_that_are_too_small(tmp_path: Path, store: Path) -> None:
    import tifffile

    path = tmp_path / "glass.tif"
    tifffile.imwrite(path, np.full((512, 512, 3), 255, np.uint8), tile=(256, 256), resolution=(20000, 20000),
                     resolutionunit="CENTIMETER", photometric="rgb")  # fmt: skip
    with pytest.raises(SlideError, match=r"no tissue was found.*data\.patches\.over: slide"):
        bag(path, size=64)
    assert bag(path, size=64, over="slide").shape[0] == 64
    with pytest.raises(SlideError, match=r"min_tissue 1 of tissue \(\d+\.\d+% of it is tissue\); set it lower"):
        bag(store, size=600, min_tissue=1.0)
    with pytest.raises(SlideError, match=r"900 × 700 pixels.* too small for one patch of 701"):
        bag(store, size=701)


def write_h5(path: Path, coords: object, **attributes: object) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.create_dataset("coords", data=coords)
        file["coords"].attrs.update(attributes)
    return path


TRIDENT = {"patch_size": 48, "patch_size_level0": 48, "level0_magnification": 20, "target_magnification": 20,
           "overlap": 0, "name": "a", "savetodir": "out", "level0_width": 700, "level0_height": 900}  # fmt: skip
CLAM = {"patch_size": 48, "patch_level": 0, "downsample": np.array([1.0, 1.0]), "downsampled_level_dim": (700, 900),
        "level_dim": (700, 900), "name": "a", "save_path": "out"}  # fmt: skip
POINTS = [(10, 20), (301, 402), (652, 852)]


def test_coords_of_trident_and_of_clam(store: Path, tmp_path: Path) -> None:
    expected = {(y, x) for x, y in POINTS}
    path = write_h5(tmp_path / "a_patches.h5", np.array(POINTS, np.int32), **TRIDENT)
    assert corners(bag(store, size=48, positions=tmp_path)) == expected
    path.unlink()
    write_h5(tmp_path / "a.h5", np.array(POINTS), **CLAM)
    assert corners(bag(store, size=48, positions=tmp_path)) == expected
    with pytest.raises(SlideError, match=r"has patches of 48 pixels of level 0.*\(size 96\) have 96; set data"):
        bag(store, size=96, positions=tmp_path)
    # The same patches at half the resolution; CLAM says of a level how large they are there.
    write_h5(
        tmp_path / "a.h5", np.array([(10, 20), (300, 402)]), **{**CLAM, "patch_size": 24, "downsample": (2.0, 2.0)}
    )
    assert corners(bag(store, size=24, mpp=1.0, positions=tmp_path)) == {(10, 5), (201, 150)}
    (tmp_path / "a_patches.h5").write_bytes(b"")
    with pytest.raises(SlideError, match=r"has a\.h5 and a_patches\.h5; leave one"):
        bag(store, size=48, positions=tmp_path)


@pytest.mark.parametrize(
    ("coords", "attributes", "message"),
    [
        (POINTS, {**TRIDENT, "level0_width": 900, "level0_height": 700}, "slide of 900 × 700 .* has 700 × 900"),
        (POINTS, {}, "nothing of the size of its patches"),
        ([1, 2], TRIDENT, r"coords is \(2,\)"),
        (np.empty((0, 2)), TRIDENT, "has no patches"),
        ([(0, 0), (9000, 1)], TRIDENT, "1 of its 2 patches lie outside .* at x 9000, y 1; give pixels of level 0"),
        ([(0.0, float("nan"))], TRIDENT, "no finite number"),
        (POINTS, {**TRIDENT, "patch_size_level0": "large"}, "an attribute of coords is no number"),
    ],
)
def test_files_that_do_not_go_with_a_slide(
    store: Path, tmp_path: Path, coords: object, attributes: dict[str, object], message: str
) -> None:
    write_h5(tmp_path / "a.h5", coords, **attributes)
    with pytest.raises(SlideError, match=message):
        bag(store, size=48, positions=tmp_path)


def test_a_file_that_is_no_hdf5_or_has_no_coords(store: Path, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "a.h5").write_bytes(b"no HDF5")
    with pytest.raises(SlideError, match="cannot be read as HDF5"):
        bag(store, size=48, positions=tmp_path)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"] = np.zeros((3, 4))
    with pytest.raises(SlideError, match="no dataset coords; it has features"):
        bag(store, size=48, positions=tmp_path)
    with pytest.raises(SlideError, match=r"has none of a\.h5, a_patches\.h5, a\.geojson, a\.csv"):
        bag(store, size=48, positions=store)


def square(x: float, y: float, side: float) -> dict[str, object]:
    ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
    return {"type": "Polygon", "coordinates": [ring]}


def write_geojson(folder: Path, *found: dict[str, object]) -> None:
    features = [{"type": "Feature", "properties": {}, "geometry": one} for one in found]
    (folder / "a.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def test_squares_points_and_tables(store: Path, tmp_path: Path) -> None:
    write_geojson(tmp_path, square(10, 20, 48), {"type": "MultiPoint", "coordinates": [[325, 426], [100, 100]]})
    assert corners(bag(store, size=48, positions=tmp_path)) == {(20, 10), (402, 301), (76, 76)}
    for wrong, message in (
        ([square(0, 0, 48), square(9, 9, 96)], "no square of 72 pixels"),
        ([{"type": "Polygon", "coordinates": [[[0, 0], [48, 0], [0, 48], [0, 0]]]}], "no square"),
        ([{"type": "LineString", "coordinates": [[0, 0], [1, 1]]}], "LineString; patches are squares"),
        ([{"type": "Polygon", "coordinates": []}], "empty geometry"),
        ([], "has no patches"),
    ):
        write_geojson(tmp_path, *wrong)
        with pytest.raises(SlideError, match=message):
            bag(store, size=48, positions=tmp_path)
    (tmp_path / "a.geojson").write_text("{")
    with pytest.raises(SlideError, match="not GeoJSON with squares or points"):
        bag(store, size=48, positions=tmp_path)
    (tmp_path / "a.geojson").unlink()
    (tmp_path / "a.csv").write_text("x,y,score\n10,20,0.5\n301,402,0.1\n")
    assert corners(bag(store, size=48, positions=tmp_path)) == {(20, 10), (402, 301)}
    (tmp_path / "a.csv").write_text("x,y\n10,left\n")
    with pytest.raises(UserError, match="line 2: x is '10' and y is 'left'"):
        bag(store, size=48, positions=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, r"data\.patches\.size is 0; it must be 1 or more"),
        ({"stride": 0}, r"data\.patches\.stride is 0; it must be 1 or more"),
        ({"mpp": 20.5}, r"data\.patches\.mpp is 20\.5; it is micrometres per pixel, .* not a magnification"),
        ({"min_tissue": 25}, r"min_tissue is 25; it is a share, from 0 to 1"),
        ({"shift": -1}, r"shift is -1"),
        ({"stain": float("nan")}, r"stain is nan"),
        ({"positions": Path("nowhere")}, r"positions is nowhere; there is no such folder"),
        ({"positions": Path("."), "stride": 9}, r"leave out data\.patches\.stride"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PatchConfig(**settings)


@pytest.mark.parametrize("key", [{"downsample": 2}, {"extra_downsamples": (4,)}])
def test_whole_images_and_bags_do_not_mix(key: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"data\.{next(iter(key))} is for whole images; .* data\.patches\.mpp"):
        DataConfig(manifest=Path("m.csv"), patches=PatchConfig(), **key)


def test_h5py_that_is_missing_is_named(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.h5").touch()
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(UserError, match=r"pip install 'wsi-trainer\[hdf5\]'"):
        bag(store, size=48, positions=tmp_path)
