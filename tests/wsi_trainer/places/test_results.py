"""A place found in a result shows the same pixels in the original slide, as OpenSlide reads it.

The slide is a ramp: red grows with x and green with y, so that a mean tells where it was taken, to a tenth of a pixel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openslide
import pytest
import torch
import zarr
from PIL import Image

from lightning_plugin import Box
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.explain.slide_map import MapOptions, SlideMap
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.slide import views
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, Settings, convert

from .scn import write_scn

STRIDE = 16
CORNER, SIZE, CANVAS = (203, 301), (512, 640), (1200, 1500)
ALIGNED = (204, 300)
"""OpenSlide puts coarser levels at whole pixels of theirs: only with such a corner do they lie where level 0 does."""
LEVELS = 0.35
"""Of red or green for one pixel of the slide."""


@pytest.fixture(scope="module")
def scn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ramp(tmp_path_factory.mktemp("scn") / "slide.scn", CORNER)


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ramp(tmp_path_factory.mktemp("scn") / "aligned.scn", ALIGNED)


def write_ramp(path: Path, corner: tuple[int, int]) -> Path:
    y, x = np.mgrid[0 : SIZE[0], 0 : SIZE[1]]
    pixels = np.stack([20 + x * LEVELS, 20 + y * LEVELS, np.full(SIZE, 90)], axis=2).round().astype(np.uint8)
    write_scn(path, pixels, corner, CANVAS)
    return path


@dataclass(frozen=True)
class Made:
    """The results of a map whose values are the numbers of its positions, from 1."""

    source: Image
    entry: dict
    folder: Path
    columns: int

    def mean(self, number: int) -> np.ndarray:
        """What the model saw at a position."""
        row, column = divmod(number - 1, self.columns)
        lo = (row * STRIDE, column * STRIDE)
        hi = tuple(min(start + STRIDE, end) for start, end in zip(lo, self.source.shape[2:]))
        return self.source.read(Box(lo, hi)).double().mean(dim=(0, 2, 3)).numpy()


def make(path: Path, folder: Path, downsample: int = 1, **options: object) -> Made:
    source = views.Image(Slide.open(path), factor=downsample)
    shape = tuple(-(-side // STRIDE) for side in source.shape[2:])
    values = torch.arange(1, 1 + shape[0] * shape[1]).view(shape).double()
    folder.mkdir(exist_ok=True)
    one = SlideMap(folder, SlideRecord("s", path, "", "", ""), source.shape[2:], source.place, STRIDE, "s")
    files = one.write(values, source, MapOptions(size=40, **options), PathClass.of("tumour", 1))  # type: ignore[arg-type]
    return Made(source, files.entry, folder, shape[1])


def looked_up(slide: openslide.OpenSlide, left: float, top: float, right: float, bottom: float) -> np.ndarray:
    """The mean of a rectangle of level 0, parts of pixels counted in part."""
    corner = (int(left), int(top))
    size = (int(np.ceil(right)) - corner[0], int(np.ceil(bottom)) - corner[1])
    pixels = np.asarray(slide.read_region(corner, 0, size).convert("RGB")).astype(float)
    weights = [
        np.clip(np.minimum(np.arange(length) + 1, high - start) - np.maximum(np.arange(length), low - start), 0, 1)
        for start, length, low, high in ((corner[1], size[1], top, bottom), (corner[0], size[0], left, right))
    ]
    weight = weights[0][:, None] * weights[1]
    return (pixels * weight[..., None]).sum(axis=(0, 1)) / weight.sum()


def scanned_part(slide: openslide.OpenSlide) -> np.ndarray:
    """Left, top, right and bottom of the bounds."""
    left, top, width, height = (
        int(slide.properties[f"openslide.bounds-{key}"]) for key in ("x", "y", "width", "height")
    )
    return np.array([left, top, left + width, top + height])


ON_LEVEL = "a level of the slide"
CASES = {
    "as it is": ({}, 1),
    "cropped": ({"crop": "bounds"}, 1),
    "coarser": ({"mpp": 0.73}, 1),
    "coarser and cropped": ({"crop": "bounds", "mpp": 0.73}, 1),
    "odd scale": ({"crop": "bounds", "mpp": 1.37}, 1),
    ON_LEVEL: ({"crop": "bounds", "mpp": 2.0001}, 1),
    "shrunk for training": ({"crop": "bounds", "mpp": 0.61}, 2),
}
NEAR: dict[str | None, float] = {"shrunk for training": 1.2}
"""Of pixels: levels of a store round halves up, which on a ramp looks like up to a pixel of the slide."""


@pytest.mark.parametrize("case", [None, *CASES])
def test_tiles_show_the_pixels_of_the_original_slide(
    scn: Path, aligned: Path, tmp_path: Path, case: str | None
) -> None:
    scn = aligned if case == ON_LEVEL else scn
    path, downsample = scn, 2
    if case is not None:
        changes, downsample = CASES[case]
        convert(Job(scn, "s"), tmp_path, Settings(chunk=64, shard=256, tissue="none", **changes))  # type: ignore[arg-type]
        path = tmp_path / "s.zarr"
    made = make(path, tmp_path / "maps", downsample)
    features = json.loads((made.folder / made.entry["tiles"]).read_text())["features"]
    compared = 0
    with openslide.OpenSlide(scn) as slide:
        scanned = scanned_part(slide)
        for feature in features:
            ring = np.array(feature["geometry"]["coordinates"][0])
            left, top, right, bottom = *ring.min(axis=0), *ring.max(axis=0)
            if not ((left, top) >= scanned[:2] + 12).all() or not ((right, bottom) <= scanned[2:] - 12).all():
                continue  # at the border of what was scanned there is no ramp
            number = int(feature["properties"]["measurements"]["mean value"])
            off = (made.mean(number) - looked_up(slide, left, top, right, bottom))[:2] / LEVELS
            assert np.abs(off).max() < NEAR.get(case, 0.5), f"position {number} is {off} px off"
            compared += 1
    assert compared > 8


@pytest.mark.parametrize("case", CASES)
def test_layers_and_top_regions_lie_where_the_tiles_do(scn: Path, tmp_path: Path, case: str) -> None:
    models = pytest.importorskip("ome_zarr_models", reason="extra validate is not installed")
    changes, downsample = CASES[case]
    convert(Job(scn, "s"), tmp_path, Settings(chunk=64, shard=256, tissue="none", **changes))  # type: ignore[arg-type]
    made = make(tmp_path / "s.zarr", tmp_path / "maps", downsample)
    rings = {}
    for feature in json.loads((made.folder / made.entry["tiles"]).read_text())["features"]:
        rings[int(feature["properties"]["measurements"]["mean value"])] = feature["geometry"]["coordinates"][0]
    for version, name in made.entry["layers"].items():
        group = zarr.open_group(made.folder / name, mode="r")
        models.open_ome_zarr(group)
        attributes = dict(group.attrs)
        found = attributes["ome"] if version == "0.5" else attributes
        said = found["version"] if version == "0.5" else found["multiscales"][0]["version"]
        assert said == version
        values = group["0"][:]
        scale, shift = found["multiscales"][0]["datasets"][0]["coordinateTransformations"]
        for row, column in np.argwhere(np.isin(values[:-1, :-1], list(rings)))[::7]:
            ring = np.array(rings[int(values[row, column])])
            centre = (ring.min(axis=0) + ring.max(axis=0)) / 2  # in the slide, x and y
            at = [shift["translation"][axis] + scale["scale"][axis] * index for axis, index in ((1, column), (0, row))]
            np.testing.assert_allclose(np.array(at) / 0.5 + 0.5, centre, atol=1e-3)
    with openslide.OpenSlide(scn) as slide:
        for one in made.entry["top"]:
            assert one["x"] + one["width"] <= CANVAS[1] and one["y"] + one["height"] <= CANVAS[0]
            shown = np.asarray(Image.open(made.folder / one["picture"])).astype(float).mean(axis=(0, 1))
            there = looked_up(slide, one["x"], one["y"], one["x"] + one["width"], one["y"] + one["height"])
            corners = np.array([one["x"], one["y"], one["x"] + one["width"], one["y"] + one["height"]])
            if ((corners - scanned_part(slide)) * [1, 1, -1, -1] > 8).all() and case != ON_LEVEL:
                assert np.abs(shown - there)[:2].max() / LEVELS < 1


def test_outlines_have_a_class_with_its_colour_and_ids_that_stay(scn: Path, tmp_path: Path) -> None:
    first, again = make(scn, tmp_path / "one"), make(scn, tmp_path / "two")
    texts = [(made.folder / made.entry["outlines"]).read_text() for made in (first, again)]
    assert texts[0] == texts[1]
    tiles = json.loads((first.folder / first.entry["tiles"]).read_text())
    outlined = json.loads(texts[0])
    ids = [feature["id"] for file in (tiles, outlined) for feature in file["features"]]
    assert len(set(ids)) == len(ids) > 1
    for feature in outlined["features"]:
        assert feature["properties"]["classification"] == {"name": "tumour", "color": [200, 30, 30]}
        assert feature["properties"]["objectType"] == "annotation"
    assert {feature["properties"]["objectType"] for feature in tiles["features"]} == {"tile"}
    assert tiles["wsi_trainer"]["place"]["bounds"][2:] == [*SIZE]


def test_top_regions_of_a_real_slide_are_there_in_the_original(shared_data: Path, tmp_path: Path) -> None:
    original = shared_data / "slides" / "CMU-1-Small-Region.svs"
    convert(Job(original, "s"), tmp_path, Settings(mpp=1.13, tissue="none"))
    made = make(tmp_path / "s.zarr", tmp_path / "maps", tiles=0)
    with openslide.OpenSlide(original) as slide:
        for one in made.entry["top"]:
            picture = np.asarray(Image.open(made.folder / one["picture"])).astype(float)
            off = {}
            for dx, dy in np.ndindex(5, 5):
                corner, size = (one["x"] + dx - 2, one["y"] + dy - 2), (one["width"], one["height"])
                seen = (
                    slide.read_region(corner, 0, size).convert("RGB").resize(picture.shape[1::-1], Image.Resampling.BOX)
                )
                off[dx - 2, dy - 2] = np.abs(np.asarray(seen) - picture).mean()
            assert min(off, key=lambda shift: off[shift]) == (0, 0)
