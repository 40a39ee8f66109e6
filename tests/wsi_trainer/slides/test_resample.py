"""Resampling does not depend on how the image is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.store.writer import halve


@pytest.mark.parametrize("factor", [1.37, pytest.param(2.0, marks=pytest.mark.full), 3.0, 7.3])
def test_tiles_equal_the_whole(slide: Path, factor: float) -> None:
    with Slide.open(slide) as reader:
        image = ScaledImage(reader, factor)
        height, width = image.shape
        whole = image.read(0, 0, height, width)
        tiled = np.zeros_like(whole)
        for y in range(0, height, 61):
            for x in range(0, width, 83):
                h, w = min(61, height - y), min(83, width - x)
                tiled[y : y + h, x : x + w] = image.read(y, x, h, w)
    assert np.array_equal(whole, tiled)


def test_lanczos_of_a_single_level_equals_pillow(tmp_path: Path, noise: np.ndarray) -> None:
    tifffile.imwrite(tmp_path / "s.tif", noise, tile=(128, 128), photometric="rgb")
    with Slide.open(tmp_path / "s.tif", "tiff") as reader:
        image = ScaledImage(reader, 2.5)
        assert image.shape == (280, 200)
        expected = np.asarray(Image.fromarray(noise).resize((200, 280), Image.Resampling.LANCZOS))
        assert np.abs(image.read(0, 0, 280, 200).astype(int) - expected).max() <= 1


def test_level_of_the_slide_is_taken_as_it_is(slide: Path) -> None:
    with Slide.open(slide) as reader:
        image = ScaledImage(reader, 4.0)
        assert image.is_exact
        assert image.level == 1
        assert np.array_equal(image.read(5, 6, 70, 80), reader.read(1, 5, 6, 70, 80))
        assert not ScaledImage(reader, 4.5).is_exact
        assert ScaledImage(reader, 4.5).level == 1
        assert ScaledImage(reader, 3.9).level == 0


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 1), (2, 1)])
def test_halve(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
    padded = np.pad(pixels, ((0, 0), (0, shape[0] % 2), (0, shape[1] % 2)), mode="edge").astype(float)
    blocks = padded.reshape(3, padded.shape[1] // 2, 2, padded.shape[2] // 2, 2)
    assert np.array_equal(halve(pixels), np.floor(blocks.mean((2, 4)) + 0.5))
