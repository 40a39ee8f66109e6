"""Augmented bags: the same bag, epoch and seed show the same pixels, whatever tiles are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_plugin import Box
from wsi_trainer.slide.augment import (
    Augmentation,
    Augmented,
    Augmenter,
    PatchAugmentations,
    PatchAugmenter,
    StainShift,
    moved,
)
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Bag, Image

POSITIONS = np.array([[300, 300], [0, 0], [517, 401], [980, 760], [400, 320]], np.int32)
SIZE = 70
WHOLE = Box((0, 0, 0), (len(POSITIONS), SIZE, SIZE))


def bag(store: Path, slide: Augmentation, each: PatchAugmentations) -> Augmented:
    return Augmented(Bag(Slide.open(store), moved(POSITIONS, slide, each), SIZE), slide, each)


@pytest.mark.parametrize("bits", range(8))
def test_a_slide_is_augmented_as_it_is_when_it_is_read_whole(store: Path, bits: int) -> None:
    """A patch of the bag is the patch of the augmented slide, at the place to which the slide has taken it."""
    how = Augmentation(
        bool(bits & 1), bool(bits & 2), bool(bits & 4), (13, -40), StainShift((1.1, 0.9, 1.0), (0.02,) * 3)
    )
    shown = Augmented(Image(Slide.open(store)), how)
    patches = bag(store, how, PatchAugmentations()).read(WHOLE)
    height, width = Image(Slide.open(store)).shape[2:]
    for (y, x), patch in zip(POSITIONS.tolist(), patches):
        y = height - y - SIZE if how.flip_y else y
        x = width - x - SIZE if how.flip_x else x
        y, x = (x, y) if how.transpose else (y, x)
        top, left, bottom, right = max(y, 0), max(x, 0), min(y + SIZE, shown.shape[2]), min(x + SIZE, shown.shape[3])
        there = shown.read(Box((top, left), (bottom, right)))[0]
        assert torch.equal(patch[:, top - y : bottom - y, left - x : right - x], there)


def test_each_patch_is_turned_moved_and_stained_by_itself(store: Path) -> None:
    each = PatchAugmenter(3, shift=9, stain=0.2, tint=0.05).draw("slide", 4, len(POSITIONS))
    assert each.turns is not None and each.shifts is not None and each.stains is not None
    assert len(np.unique(each.shifts, axis=0)) > 1 and len(np.unique(each.stains, axis=0)) == len(POSITIONS)
    patches = bag(store, Augmentation(), each).read(WHOLE)
    for number, (y, x) in enumerate(POSITIONS.tolist()):
        down, right = each.shifts[number].tolist()
        plain = Bag(Slide.open(store), np.array([[y + down, x + right]]), SIZE).read(Box((0, 0, 0), (1, SIZE, SIZE)))
        stained = StainShift(tuple(each.stains[number, :3].tolist()), tuple(each.stains[number, 3:].tolist()))
        expected = stained.apply(plain)[0].numpy()
        flip_y, flip_x, transpose = each.turns[number].tolist()
        expected = expected[:, ::-1] if flip_y else expected
        expected = expected[:, :, ::-1] if flip_x else expected
        expected = expected.transpose(0, 2, 1) if transpose else expected
        assert np.array_equal(patches[number].numpy(), expected)
        assert abs(down) <= 9 and abs(right) <= 9


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_any_tiles_show_the_same_pixels(store: Path, data: st.DataObject, seed: int, epoch: int) -> None:
    slide = Augmenter(seed, shift=30, stain=0.1, tint=0.03).draw("a", epoch)
    each = PatchAugmenter(seed, shift=5, stain=0.1, tint=0.03).draw("a", epoch, len(POSITIONS))
    whole = bag(store, slide, each).read(WHOLE)
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, end)] * 2))) for end in WHOLE.hi]
    box = Box(tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))
    again = bag(store, slide, each)
    again.prefetch([box])
    part = again.read(box)
    (a, y, x), (b, bottom, right) = box.lo, box.hi
    assert torch.equal(part, whole[a:b, :, y:bottom, x:right])
    value = again.constant(box)
    assert value is None or (part == value[None, :, None, None]).all()


def test_draws_differ_between_slides_epochs_and_seeds_and_not_otherwise() -> None:
    draws = [
        PatchAugmenter(seed, shift=9, stain=0.1).draw(slide, epoch, 50)
        for seed, slide, epoch in ((0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a", 0))
    ]
    for field in ("turns", "shifts", "stains"):
        first, *others, again = [getattr(draw, field) for draw in draws]
        assert np.array_equal(first, again)
        assert not any(np.array_equal(first, other) for other in others)
    fewer = PatchAugmenter(0, turn=False, shift=9).draw("a", 0, 50)
    assert fewer.turns is None and fewer.stains is None and np.array_equal(fewer.shifts, draws[0].shifts)
