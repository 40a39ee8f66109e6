"""Exact augmentation of bags: how the slide is shown, and beside it how each of its patches is.

As for whole slides, everything is a function of one pixel or of its position, drawn for a slide and an epoch; what a
patch shows does not depend on the tiles in which the bag is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box, TileSource

from .augment import Augmentation
from .formats import format_of
from .patch_source import Positions
from .stain import StainShift


@dataclass(frozen=True, eq=False)
class PatchAugmentations:
    """How each patch of one bag is shown in one epoch; what is None changes nothing.

    Attributes:
        turns: Of each patch whether its rows and its columns are mirrored, and then exchanged, (K, 3).
        shifts: Pixels by which each patch is taken further down and to the right, (K, 2).
        stains: Of each patch the factors on its three stains and the tint of its three colours, (K, 6).
    """

    turns: NDArray[np.bool_] | None = None
    shifts: Positions | None = None
    stains: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class PatchAugmenter:
    """Draws the augmentations of bags. Equal seed, slide, epoch and number of patches give the same ones.

    Attributes:
        turn, shift, stain, tint: As of an `Augmenter`, drawn for each patch.
    """

    seed: int = 0
    turn: bool = True
    shift: int = 0
    stain: float = 0.0
    tint: float = 0.0

    def draw(self, slide: str, epoch: int, count: int) -> PatchAugmentations:
        """The augmentations of the patches of a slide, by its name, in an epoch."""
        name = int.from_bytes(hashlib.sha256(f"patches of {slide}".encode()).digest()[:8], "little")
        turn, shift, stain = (np.random.default_rng([self.seed, epoch, name, kind]) for kind in range(3))
        shifts = shift.integers(-self.shift, self.shift + 1, (count, 2), np.int32) if self.shift else None
        stains = None
        if self.stain or self.tint:
            stains = stain.random((count, 6), np.float32) * 2 - 1
            stains[:, :3] = 1 + self.stain * stains[:, :3]
            stains[:, 3:] *= self.tint
        return PatchAugmentations(turn.random((count, 3), np.float32) < 0.5 if self.turn else None, shifts, stains)


def moved(positions: Positions, slide: Augmentation, each: PatchAugmentations) -> Positions:
    """Where patches are read whose slide is shifted, and which are shifted themselves."""
    there = positions - np.array(slide.shift, np.int32)
    return there if each.shifts is None else there + each.shifts


@dataclass(frozen=True, eq=False)
class AugmentedPatches:
    """A `TileSource` of bytes that shows a bag augmented; shifts are in its positions already (`moved`)."""

    source: TileSource
    slide: Augmentation
    each: PatchAugmentations

    instances = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, box: Box) -> Tensor:
        """The pixels of a box of patches; each is read whole, since each may be turned in its own way."""
        patches = self.source.read(self._whole(box))
        if self.slide.stain is not None:
            patches = self.slide.stain.apply(patches)
        shown = [self._shown(patches[n : n + 1], box.lo[0] + n) for n in range(len(patches))]
        (_, y, x), (_, bottom, right) = box.lo, box.hi
        whole = torch.cat(shown) if shown else patches
        return self._turned(whole, self.slide.flip_y, self.slide.flip_x, self.slide.transpose)[:, :, y:bottom, x:right]

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if the box is known to hold nothing else: glass, which no stain changes."""
        return self.source.constant(self._whole(box))

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Passes on what will be asked for soon, if the source wants to know."""
        wish = getattr(self.source, "prefetch", None)
        if wish is not None:
            wish(map(self._whole, boxes))

    def forget(self) -> None:
        """Has the source let go of pixels, if it keeps any."""
        forget = getattr(self.source, "forget", None)
        if forget is not None:
            forget()

    def _whole(self, box: Box) -> Box:
        return Box((box.lo[0], 0, 0), (box.hi[0], *self.shape[2:]))

    def _shown(self, patch: Tensor, number: int) -> Tensor:
        """One patch as it is shown for itself."""
        if self.each.stains is not None:
            values = self.each.stains[number].tolist()
            patch = StainShift(tuple(values[:3]), tuple(values[3:])).apply(patch)
        return patch if self.each.turns is None else self._turned(patch, *self.each.turns[number].tolist())

    def _turned(self, patches: Tensor, flip_y: bool, flip_x: bool, transpose: bool) -> Tensor:
        axes = [axis for axis, flip in ((2, flip_y), (3, flip_x)) if flip]
        patches = patches.flip(axes) if axes else patches
        return patches.transpose(2, 3).contiguous(memory_format=format_of(self.source)) if transpose else patches
