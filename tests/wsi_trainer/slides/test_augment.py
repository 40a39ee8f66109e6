"""Augmentation commutes with tiling: a tile of the augmented slide is the augmented tile of the slide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_plugin import Box, TensorSource, TileSource
from wsi_trainer.slide.augment import (
    Augmentation,
    Augmented,
    Augmenter,
    PatchAugmentations,
    StainShift,
    moved,
)
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Bag, Image

HEIGHT, WIDTH = 37, 53
IMAGE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 3, HEIGHT, WIDTH), np.uint8))
IMAGE[..., 5:20, 30:] = 255


class _Patchy(TensorSource):
    """Knows where its image is white."""

    def constant(self, box: Box) -> torch.Tensor | None:
        part = self.read(box)
        return torch.full((3,), 255, dtype=torch.uint8) if part.numel() and bool((part == 255).all()) else None


stains = st.one_of(
    st.none(),
    st.builds(
        StainShift,
        st.tuples(*[st.floats(0.7, 1.3)] * 3),
        st.tuples(*[st.floats(-0.1, 0.1)] * 3),
    ),
)
augmentations = st.builds(
    Augmentation, st.booleans(), st.booleans(), st.booleans(),
    st.tuples(st.integers(-60, 60), st.integers(-60, 60)), stains,
)  # fmt: skip


def _plain(image: torch.Tensor, a: Augmentation) -> torch.Tensor:
    """The augmentation of a whole image, written down plainly."""
    moved = torch.full_like(image, 255)
    for y in range(HEIGHT):
        for x in range(WIDTH):
            fy, fx = y - a.shift[0], x - a.shift[1]
            if 0 <= fy < HEIGHT and 0 <= fx < WIDTH:
                moved[..., y, x] = image[..., fy, fx]
    if a.stain is not None:
        moved = a.stain.apply(moved)
    if a.flip_y:
        moved = moved.flip(2)
    if a.flip_x:
        moved = moved.flip(3)
    return moved.transpose(2, 3) if a.transpose else moved


@given(augmentations, st.data())
def test_tiles_of_the_augmented_are_augmented_tiles(a: Augmentation, data: st.DataObject) -> None:
    source = Augmented(_Patchy(IMAGE), a)
    expected = _plain(IMAGE, a)
    assert isinstance(source, TileSource)
    assert source.shape == expected.shape
    for _ in range(4):
        y0 = data.draw(st.integers(0, source.shape[2] - 1))
        x0 = data.draw(st.integers(0, source.shape[3] - 1))
        y1 = data.draw(st.integers(y0 + 1, source.shape[2]))
        x1 = data.draw(st.integers(x0 + 1, source.shape[3]))
        tile = source.read(Box((y0, x0), (y1, x1)))
        assert torch.equal(tile, expected[:, :, y0:y1, x0:x1])
        value = source.constant(Box((y0, x0), (y1, x1)))
        assert value is None or bool((tile == value[None, :, None, None]).all())


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
    each = Augmenter(3, shift=9, stain=0.2, tint=0.05).draw_patches("slide", 4, len(POSITIONS))
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
    each = Augmenter(seed, shift=5, stain=0.1, tint=0.03).draw_patches("a", epoch, len(POSITIONS))
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
        Augmenter(seed, shift=9, stain=0.1).draw_patches(slide, epoch, 50)
        for seed, slide, epoch in ((0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a", 0))
    ]
    for field in ("turns", "shifts", "stains"):
        first, *others, again = [getattr(draw, field) for draw in draws]
        assert np.array_equal(first, again)
        assert not any(np.array_equal(first, other) for other in others)
    fewer = Augmenter(0, turn=False, shift=9).draw_patches("a", 0, 50)
    assert fewer.turns is None and fewer.stains is None and np.array_equal(fewer.shifts, draws[0].shifts)
