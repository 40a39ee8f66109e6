"""The tissue mask: what is stained and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.slide.tissue import find_tissue, is_dark
from wsi_trainer.synthetic import SlideSpec, SyntheticSlide


@pytest.mark.parametrize("noise", [False, True])
def test_mask_finds_the_tissue_of_a_synthetic_slide(noise: bool) -> None:
    spec = SlideSpec(1600, 1400, seed=2, noise=noise, tissue=0.3)
    clean = SyntheticSlide(SlideSpec(1600, 1400, seed=2, tissue=0.3))
    truth = (clean.render(0, 0, 1600, 1400) != clean.background).any(2)
    pixels = SyntheticSlide(spec).render(0, 0, 1600, 1400)
    small = pixels[:, :1392].reshape(100, 16, 87, 16, 3).mean((1, 3)).astype(np.uint8)
    mask = find_tissue(small, 16)
    covered = mask.cover(0, 0, 1600, 1392)
    assert (truth[:, :1392] & ~covered).sum() / truth.sum() < 0.01
    assert mask.share < 2 * truth.mean()
    assert mask.lost < 0.02


def test_glass_alone_holds_no_tissue() -> None:
    pixels = SyntheticSlide(SlideSpec(800, 800, noise=True, tissue=0.05)).render(0, 0, 120, 120)
    noisy = np.random.default_rng(0).normal(242, 3, (200, 200, 3)).clip(0, 255).astype(np.uint8)
    assert not find_tissue(noisy, 16).mask.any()
    assert not find_tissue(pixels, 16).mask.any()


def test_fluorescence_is_bright_on_dark() -> None:
    pixels = np.zeros((200, 200, 3), np.uint8)
    pixels[50:120, 60:140, 2] = 180
    mask = find_tissue(pixels, 16).mask
    assert mask[80, 100]
    assert mask.mean() < 0.25


def test_real_slide(real_slides: Path) -> None:
    with Slide.open(real_slides / "CMU-1-Small-Region.svs") as reader:
        coarse = ScaledImage(reader, 16, smooth=False)
        mask = find_tissue(coarse.read(0, 0, *coarse.shape), 16)
    assert 0.35 < mask.share < 0.55
    assert mask.mask[100, 70]  # middle of the tissue
    assert not mask.mask[150, 10]  # glass


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint8, array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=9), elements=st.integers(60, 68)))
def test_a_slide_is_dark_where_its_median_is(values: np.ndarray) -> None:
    assert is_dark(values) == bool(np.median(values) < 64)
