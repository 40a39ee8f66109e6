"""A synthetic slide is a function of its spec and the position, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from wsi_trainer.synthetic import SlideSpec, SyntheticSlide


@pytest.fixture(scope="module")
def slide() -> SyntheticSlide:
    return SyntheticSlide(SlideSpec(1111, 1403, seed=5, positive=True))


def test_box_does_not_depend_on_how_it_is_cut(slide: SyntheticSlide) -> None:
    whole = slide.render(0, 0, 1111, 1403).astype(int)
    pieces = np.zeros_like(whole)
    for y in range(0, 1111, 171):  # a grid unrelated to any other, so that nuclei and groups are cut
        for x in range(0, 1403, 233):
            height, width = min(171, 1111 - y), min(233, 1403 - x)
            pieces[y : y + height, x : x + width] = slide.render(y, x, height, width)
    # A matrix product of another size may round differently: one grey level in few pixels.
    difference = np.abs(whole - pieces)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_same_spec_same_pixels_other_slide_other_pixels(slide: SyntheticSlide) -> None:
    again = SyntheticSlide(slide.spec)
    other = SyntheticSlide(SlideSpec(1111, 1403, seed=5, slide=1, positive=True))
    assert np.array_equal(slide.render(300, 300, 500, 500), again.render(300, 300, 500, 500))
    assert not np.array_equal(slide.render(300, 300, 500, 500), other.render(300, 300, 500, 500))


def test_label_changes_lesion_nuclei_only(slide: SyntheticSlide) -> None:
    negative = SyntheticSlide(SlideSpec(1111, 1403, seed=5, positive=False))
    changed = (slide.render(0, 0, 1111, 1403) != negative.render(0, 0, 1111, 1403)).any(-1)
    ys, xs = np.nonzero(changed)
    near = np.zeros(len(ys), bool)
    for site in slide.sites:
        dy, dx = ys - site.y, xs - site.x
        shrink = 1 - 9 / np.maximum(np.hypot(dy, dx), 10)  # a nucleus reaches 9 px beyond its centre
        near |= site.contains(site.y + dy * shrink, site.x + dx * shrink)
    assert changed.any()
    assert near.all()


def test_label_is_invisible_after_downsampling() -> None:
    """The same slide with and without lesions: differences at 8x are far below what varies anyway."""
    positive = SyntheticSlide(SlideSpec(1600, 1600, seed=3, positive=True)).render(0, 0, 1600, 1600)
    negative = SyntheticSlide(SlideSpec(1600, 1600, seed=3, positive=False)).render(0, 0, 1600, 1600)

    def reduced(image: np.ndarray, factor: int) -> np.ndarray:
        side = 1600 // factor
        return image.astype(np.float64).reshape(side, factor, side, factor, 3).mean((1, 3))

    changed = reduced((positive != negative).any(-1)[..., None].repeat(3, -1), 8)[..., 0] > 0.2
    full = np.abs(positive.astype(float) - negative)[positive != negative].mean()
    small = (reduced(positive, 8) - reduced(negative, 8))[changed]
    assert full > 15  # grey levels: plain to see at full resolution
    assert np.abs(small.mean(0)).max() < 0.15
    assert small.std() < 0.1 * reduced(negative, 8)[changed].std(0).mean()
    assert abs(reduced(positive, 8)[changed].std() / reduced(negative, 8)[changed].std() - 1) < 0.01


def test_glass_is_one_colour_without_noise_and_none_with_it() -> None:
    plain, noisy = (SyntheticSlide(SlideSpec(900, 800, noise=noise)) for noise in (False, True))
    corner = plain.render(0, 0, 24, 24)
    assert (corner == plain.background).all()
    grain = noisy.render(0, 0, 24, 24).astype(float)
    assert 1 < grain.std() < 4
    assert abs(grain.mean() - plain.background.mean()) < 0.5


def test_known_glass_holds_no_tissue(slide: SyntheticSlide) -> None:
    whole = slide.render(0, 0, 1111, 1403)
    known = 0
    for y in range(0, 1111 - 64, 64):
        for x in range(0, 1403 - 64, 64):
            if slide.is_background(y, x, 64, 64):
                known += 1
                assert (whole[y : y + 64, x : x + 64] == slide.background).all()
    assert known > 50


@pytest.mark.parametrize("tissue", [0.2, 0.5])
def test_share_of_tissue_is_about_what_was_asked(tissue: float) -> None:
    slide = SyntheticSlide(SlideSpec(1200, 1500, tissue=tissue))
    covered = (slide.render(0, 0, 1200, 1500) != slide.background).any(-1).mean()
    assert abs(covered - tissue) < 0.08


@pytest.mark.parametrize("bad", [{"height": 10}, {"tissue": 0.0}, {"seed": -1}])
def test_impossible_specs_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad)).replace("height", "too small")):
        SlideSpec(**{"height": 500, "width": 500, **bad})


@pytest.mark.parametrize("seed", range(8))  # whose textures take longer to make than all slides of a seed
def test_the_smallest_slides_are_drawn(seed: int) -> None:
    for height, width in ((64, 64), (96, 130), (130, 96), (64, 200)):
        for tissue in (0.02, 0.4, 0.9):
            slide = SyntheticSlide(SlideSpec(height, width, seed=seed, tissue=tissue, positive=True))
            assert slide.render(0, 0, height, width).shape == (height, width, 3)
            assert slide.sites
