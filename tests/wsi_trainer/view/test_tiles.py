"""Tiles against the pixels that were written, and against OpenSlide."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.wsi_trainer.view.conftest import DOWNSAMPLE, STRIDE, Made, Served, make_run
from wsi_trainer.slide.slide import Slide
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.tiles import TILE, BadNumber, NotThere, TiledSlide


def assembled(slide: TiledSlide, level: int) -> np.ndarray:
    rows, columns = slide.grid(level)
    lines = [np.concatenate([slide.tile(level, row, column) for column in range(columns)], 1) for row in range(rows)]
    return np.concatenate(lines, 0)


def block_means(pixels: np.ndarray, side: int) -> np.ndarray:
    """Means over whole squares; what is left at the end is not looked at."""
    rows, columns = (size // side for size in pixels.shape[:2])
    squares = pixels[: rows * side, : columns * side].astype(np.float64).reshape(rows, side, columns, side, 3)
    return squares.mean(axis=(1, 3))


@given(height=st.integers(1, 1300), width=st.integers(1, 1300), seed=st.integers(0, 9))
def test_tiles_make_up_the_slide(tmp_path_factory: pytest.TempPathFactory, height: int, width: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path = tmp_path_factory.getbasetemp() / "any.tif"
    tifffile.imwrite(path, pixels, tile=(128, 128), photometric="rgb")
    with Slide.open(path) as reader:
        slide = TiledSlide(reader)
        np.testing.assert_array_equal(assembled(slide, 0), pixels)
        assert slide.coarsest == slide.depth and slide.grid(slide.depth) == (1, 1)
        for level in range(1, slide.depth + 1):
            found = assembled(slide, level)
            assert found.shape[:2] == (-(-height // 2**level), -(-width // 2**level))
            whole = block_means(pixels, 2**level)
            assert np.abs(found[: whole.shape[0] - 1, : whole.shape[1] - 1] - whole[:-1, :-1]).max(initial=0) <= 1


def test_a_slide_without_coarse_levels_has_no_tile_that_needs_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "flat.tif"
    tifffile.imwrite(path, np.zeros((200, 20_000, 3), np.uint8), tile=(128, 128), photometric="rgb", compression="zlib")
    with Slide.open(path) as reader:
        slide = TiledSlide(reader)
        assert (slide.depth, slide.coarsest) == (6, 3)
        assert slide.tile(3, 0, 4).shape == (25, 2500 - 4 * TILE, 3)
        with pytest.raises(NotThere, match="no level 4"):
            slide.tile(4, 0, 0)
        with pytest.raises(NotThere, match="coarse level"):
            slide.thumbnail(96)


def test_a_region_is_what_openslide_reads(shared_data: Path) -> None:
    path = shared_data / "slides" / "CMU-1-Small-Region.svs"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    judge = openslide.OpenSlide(str(path))
    with Slide.open(path) as reader:
        slide = TiledSlide(reader)
        for x, y in ((0, 0), (1000, 1500), (slide.width - 300, slide.height - 200)):
            there = np.asarray(judge.read_region((x, y), 0, (200, 150)).convert("RGB"))
            np.testing.assert_array_equal(slide.region(x, y, 200, 150), there)
        left = np.asarray(judge.read_region((TILE, 2 * TILE), 0, (TILE, TILE)).convert("RGB"))
        np.testing.assert_array_equal(slide.tile(0, 2, 1), left)


def test_a_region_beyond_the_border_is_background(made: Made) -> None:
    with Slide.open(made.folder.path.parent / "slides" / "slide 0 <&>.tif") as reader:
        slide = TiledSlide(reader)
        found = slide.region(-10, 690, 30, 30)
        np.testing.assert_array_equal(found[:10, 10:], made.pixels[0][690:, :20])
        assert (found[10:] == 255).all() and (found[:, :10] == 255).all()
        for box in ((0, 0, 0, 5), (0, 0, 1025, 5)):
            with pytest.raises(BadNumber):
                slide.region(*box)
        with pytest.raises(NotThere):
            slide.region(1100, 0, 5, 5)


def test_what_is_served_is_the_place_that_was_asked_for(served: Served, made: Made) -> None:
    reply = served.get("/slides/0/region.png?x=300&y=200&width=64&height=32")
    assert made.contents().slides[0].name == "slide 0 <&>.tif"
    picture = np.asarray(Image.open(io.BytesIO(reply.body)))
    np.testing.assert_array_equal(picture, made.pixels[0][200:232, 300:364])
    tile = Image.open(io.BytesIO(served.get("/slides/0/tiles/0/1-2.jpg").body))
    assert tile.size == (1100 - 2 * TILE, 700 - TILE)
    difference = np.abs(np.asarray(tile).astype(int) - made.pixels[0][TILE:, 2 * TILE :])
    assert difference.mean() < 8  # it is a JPEG


# -- layers: means, ranks, places and outlines against what is counted by hand


SQUARE = STRIDE * DOWNSAMPLE


def test_value_and_rank_at_a_place(scene: Scene, made: Made) -> None:
    values = made.maps[0]
    for row, column in ((0, 0), (5, 7), (values.shape[0] - 1, values.shape[1] - 1)):
        found = scene.at(0, "0", column * SQUARE + 3, row * SQUARE + SQUARE - 1)
        assert found["value"] == pytest.approx(float(values[row, column]))
        ordered = np.sort(values, axis=None)[::-1].tolist()
        assert found["rank"] == ordered.index(float(values[row, column])) + 1
        assert found["of"] == values.size
        assert found["box"] == [column * SQUARE, row * SQUARE, SQUARE, SQUARE]
    with pytest.raises(NotThere):
        scene.at(0, "0", -1, 0)


def test_the_largest_values_of_a_map_whose_positions_are_larger_than_a_region(tmp_path: Path) -> None:
    """A network on thumbnails: a position of its map stands for 400 × 400 pixels of the slide."""
    made = make_run(tmp_path / "run", tmp_path / "slides")
    folder, stride = made.folder.maps("activation"), 400 // DOWNSAMPLE
    values = np.array([[3, 9, 1], [8, 4, 9]], np.float32)
    np.save(folder / "map 0.npy", values)
    about = folder / "heatmaps.json"
    about.write_text(about.read_text().replace(f'"stride": {STRIDE}', f'"stride": {stride}', 1))
    with closing(Scene(made.contents())) as scene:
        for _ in range(2):
            found = scene.top(0, "0", 4)["places"]
            assert [one["value"] for one in found] == [9, 9, 8, 4]
            assert [(one["y"], one["x"]) for one in found] == [(200, 600), (600, 1000), (600, 200), (600, 600)]


def test_an_outline_surrounds_what_is_above_the_threshold(scene: Scene, made: Made) -> None:
    polygons = scene.outlines(0, "0", 0.9)["polygons"]
    values = made.maps[0]
    for polygon in polygons:
        points = np.array(polygon["rings"][0])
        assert (points >= 0).all() and (points <= [1100, 700]).all()
    row, column = np.unravel_index(values.argmax(), values.shape)
    centre = np.array([column + 0.5, row + 0.5]) * SQUARE
    distances = [np.abs(np.array(one["rings"][0]) - centre).max() for one in polygons]
    assert min(distances) < SQUARE  # one goes round the largest value and no further than its neighbours
    for bad in (0.0, 1.0, -1.0):
        with pytest.raises(BadNumber):
            scene.outlines(0, "0", bad)


def test_the_tissue_is_found_where_it_was_painted(scene: Scene, made: Made) -> None:
    layer = scene.layer(0, "tissue")
    painted = np.abs(made.pixels[0].astype(int).max(2) - made.pixels[0].min(2)) > 30
    side = int(layer.stride)
    for y in range(side // 2, 700, side):
        for x in range(side // 2, 1100, side):
            row, column = layer.position(x, y)
            if not painted[max(0, y - 6 * side) : y + 6 * side, max(0, x - 6 * side) : x + 6 * side].any():
                assert not layer.values[row, column]
    middle = layer.position(550, 350)
    assert layer.values[middle]
