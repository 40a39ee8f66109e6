"""Exact augmentation of whole slides and of bags: a tile of the augmented slide is the augmented tile of the slide.

Tables of logarithms and exponentials make the stain of a pixel the same wherever it lies in a tile: vector units round
an exponential differently at the end of a row, and a tile would show how the slide was cut.

Everything is a function of one pixel (colour) or of its position (flips, turns, shifts), drawn once for a
slide and an epoch. Nothing is computed before a tile is read, and boxes known to be constant stay known.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.slide.formats.base import FILL
from wsi_trainer.slide.views import Positions, View

# Directions of the stains in optical density of R, G and B: haematoxylin, eosin, and what is left,
# measured by Ruifrok and Johnston (2001).
_STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])

_STEPS = 1024  # of the table of exponentials for one unit of optical density
_DEEPEST = 16  # optical density beyond which everything is black
_BAND = 1 << 14  # pixels at a time: what they take beside themselves, some forty bytes each, stays in the cache


@lru_cache(maxsize=1)
def _tables() -> tuple[Tensor, Tensor]:
    """Optical density of each grey level; grey level of each step of optical density (float32)."""
    levels = torch.arange(256, dtype=torch.float64).clamp_min(0.5)
    density = -torch.log(levels / FILL)
    steps = torch.arange(_DEEPEST * _STEPS, dtype=torch.float64) / _STEPS
    back = torch.round(FILL * torch.exp(-steps)).to(torch.uint8)
    return density.float(), back


@dataclass(frozen=True)
class StainShift:
    """Factors on the amounts of haematoxylin, eosin and residue, and what is added to the density of R, G, B.

    The tint fades towards background, which stays as it is: background remains constant and white.
    """

    factors: tuple[float, ...] = (1.0, 1.0, 1.0)
    tint: tuple[float, ...] = (0.0, 0.0, 0.0)

    @cached_property
    def matrix(self) -> np.ndarray:
        """The matrix for densities of R, G, B: into stains, scaled, and back."""
        unit = _STAINS / np.linalg.norm(_STAINS, axis=1, keepdims=True)
        return np.asarray(np.linalg.inv(unit) @ np.diag(self.factors) @ unit).T

    def apply(self, pixels: Tensor) -> Tensor:
        """Bytes (n, 3, y, x) with changed stains."""
        if pixels.dtype != torch.uint8:
            raise TypeError(f"stains are changed on bytes, not on {pixels.dtype}: augment before normalising")
        out = torch.empty_like(pixels)
        rows = max(1, _BAND // max(1, pixels.shape[0] * pixels.shape[3]))
        for band, target in zip(pixels.split(rows, 2), out.split(rows, 2)):
            self._fill(target, band)
        return out

    def _fill(self, out: Tensor, pixels: Tensor) -> None:
        density, back = _tables()
        # Colour by colour, so that each lies in one piece, in whichever order the pixels come.
        red, green, blue = (density[pixels[:, channel].long()] for channel in range(3))
        # How much of anything there is, from 0 on background to 1: tint only what is stained.
        amount = ((red + green + blue) * (2 / 3)).clamp_max(1)
        for channel in range(3):
            mixed = red * float(self.matrix[channel, 0])
            mixed += green * float(self.matrix[channel, 1])
            mixed += blue * float(self.matrix[channel, 2])
            mixed += amount * float(self.tint[channel])
            step = (mixed * _STEPS).round_().clamp_(0, len(back) - 1).int()
            out[:, channel] = back[step]


@dataclass(frozen=True)
class Augmentation:
    """The view of one slide in one epoch.

    Attributes:
        flip_y, flip_x: Mirror the rows, the columns.
        transpose: Then exchange rows with columns. The three together give the eight ways to hold a slide.
        shift: Pixels by which the slide is moved down and to the right, before it is turned; what is moved
            out of the image is cut, what comes in is background.
        stain: Change of colours; None leaves them.
    """

    flip_y: bool = False
    flip_x: bool = False
    transpose: bool = False
    shift: tuple[int, int] = (0, 0)
    stain: StainShift | None = None


AS_IT_IS = Augmentation()


@dataclass(frozen=True, eq=False)
class PatchAugmentations:
    """The view of each patch of one bag in one epoch; None changes nothing.

    Attributes:
        turns: Of each patch whether its rows and its columns are mirrored, and then exchanged, (K, 3).
        shifts: Pixels by which each patch is taken further down and to the right, (K, 2).
        stains: Of each patch the factors on its three stains and the tint of its three colours, (K, 6).
    """

    turns: NDArray[np.bool_] | None = None
    shifts: Positions | None = None
    stains: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Augmenter:
    """Draws augmentations of slides, or of their patches each by itself.

    Equal seed, slide, epoch and number of patches give the same ones, in any process and order.

    Attributes:
        turn: Flips and quarter turns.
        shift: The largest shift in pixels, in both directions.
        stain: The largest relative change of the amount of each stain, such as 0.1.
        tint: The largest shift of each colour in optical density, such as 0.03.
    """

    seed: int = 0
    turn: bool = True
    shift: int = 0
    stain: float = 0.0
    tint: float = 0.0

    def draw(self, slide: str, epoch: int) -> Augmentation:
        """The augmentation of a slide, by its name, in an epoch."""
        name = int.from_bytes(hashlib.sha256(slide.encode()).digest()[:8], "little")
        rng = np.random.default_rng([self.seed, epoch, name])
        bits = rng.integers(0, 2, 3) if self.turn else np.zeros(3, int)
        shift = rng.integers(-self.shift, self.shift + 1, 2)
        factors, tint = 1 + self.stain * rng.uniform(-1, 1, 3), self.tint * rng.uniform(-1, 1, 3)
        colours = StainShift(tuple(map(float, factors)), tuple(map(float, tint))) if self.stain or self.tint else None
        return Augmentation(bool(bits[0]), bool(bits[1]), bool(bits[2]), (int(shift[0]), int(shift[1])), colours)

    def draw_patches(self, slide: str, epoch: int, count: int) -> PatchAugmentations:
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
    """The positions at which patches are read whose slide is shifted, and which are shifted themselves."""
    there = positions - np.array(slide.shift, np.int32)
    return there if each.shifts is None else there + each.shifts


class Augmented(View):
    """A source of bytes as it is shown in one epoch: an image turned, shifted and stained, or a bag.

    Of a bag, shifts are in its positions already (`moved`). It closes what it shows.

    Args:
        source: An image (1, C, height, width), or a bag of patches.
        how: Augmentation of the slide; by default none.
        each: Augmentation of each patch, where the source is a bag.
        name: Name of the slide in errors, where the source has none.
    """

    def __init__(
        self, source: TileSource, how: Augmentation = AS_IT_IS, each: PatchAugmentations | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self.source, self.how, self.each = source, how, each
        self.dtype, self.memory_format = source.dtype, source.memory_format
        self.instances = None if each is None else source.instances
        *lead, height, width = source.shape
        self.shape = (*lead, width, height) if how.transpose else (*lead, height, width)
        super().__init__(name or (source.name if isinstance(source, View) else "slide"))

    def load(self, box: Box) -> Tensor:
        """The pixels of a box as they are shown."""
        return self._image(box) if self.each is None else self._bag(box, self.each)

    def close(self) -> None:
        super().close()
        self.source.close()

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if the box is known to hold nothing else."""
        if self.each is not None:
            return self.source.constant(self._whole(box))  # background, which no stain changes
        y, x, height, width = _sizes(self._shifted(self._inner(box)))
        inside = self._clip(y, x, height, width)
        background = torch.full((self.shape[1],), FILL, dtype=self.dtype)
        if inside.empty:
            value: Tensor | None = background
        else:
            value = self.source.constant(inside)
            if value is not None and inside.extent != (height, width) and not torch.equal(value, background):
                value = None
        if value is None or self.how.stain is None:
            return value
        return self.how.stain.apply(value[None, :, None, None])[0, :, 0, 0]

    def _turned(self, pixels: Tensor, flip_y: bool, flip_x: bool, transpose: bool) -> Tensor:
        axes = [axis for axis, flip in ((2, flip_y), (3, flip_x)) if flip]
        pixels = pixels.flip(axes) if axes else pixels
        return pixels.transpose(2, 3).contiguous(memory_format=self.memory_format) if transpose else pixels

    # -- an image

    def _image(self, box: Box) -> Tensor:
        how = self.how
        tile = self._read_shifted(self._inner(box))
        if how.stain is not None:
            tile = how.stain.apply(tile)
        return self._turned(tile, how.flip_y, how.flip_x, how.transpose)

    def _inner(self, box: Box) -> Box:
        """The box before flips and turns."""
        (y0, x0), (y1, x1) = box.lo, box.hi
        if self.how.transpose:
            y0, x0, y1, x1 = x0, y0, x1, y1
        height, width = self.source.shape[2:]
        if self.how.flip_y:
            y0, y1 = height - y1, height - y0
        if self.how.flip_x:
            x0, x1 = width - x1, width - x0
        return Box((y0, x0), (y1, x1))

    def _shifted(self, box: Box) -> Box:
        down, right = self.how.shift
        return Box((box.lo[0] - down, box.lo[1] - right), (box.hi[0] - down, box.hi[1] - right))

    def _clip(self, y: int, x: int, height: int, width: int) -> Box:
        rows, columns = self.source.shape[2:]
        lo = (min(max(y, 0), rows), min(max(x, 0), columns))
        hi = (max(min(y + height, rows), lo[0]), max(min(x + width, columns), lo[1]))
        return Box(lo, hi)

    def _read_shifted(self, box: Box) -> Tensor:
        y, x, height, width = _sizes(self._shifted(box))
        inside = self._clip(y, x, height, width)
        if inside.extent == (height, width):
            return self.source.read(inside)
        shape = (*self.source.shape[:2], height, width)
        tile = torch.empty(shape, dtype=self.dtype, memory_format=self.memory_format).fill_(FILL)
        if not inside.empty:
            top, left = inside.lo[0] - y, inside.lo[1] - x
            rows, columns = inside.extent
            tile[:, :, top : top + rows, left : left + columns] = self.source.read(inside)
        return tile

    # -- a bag

    def _bag(self, box: Box, each: PatchAugmentations) -> Tensor:
        """Each patch is read whole, since each may be turned in its own way."""
        patches = self.source.read(self._whole(box))
        if self.how.stain is not None:
            patches = self.how.stain.apply(patches)
        shown = [self._patch(patches[n : n + 1], each, box.lo[0] + n) for n in range(len(patches))]
        (_, y, x), (_, bottom, right) = box.lo, box.hi
        whole = torch.cat(shown) if shown else patches
        return self._turned(whole, self.how.flip_y, self.how.flip_x, self.how.transpose)[:, :, y:bottom, x:right]

    def _whole(self, box: Box) -> Box:
        return Box((box.lo[0], 0, 0), (box.hi[0], *self.shape[2:]))

    def _patch(self, patch: Tensor, each: PatchAugmentations, number: int) -> Tensor:
        """One patch as it is shown for itself."""
        if each.stains is not None:
            values = each.stains[number].tolist()
            patch = StainShift(tuple(values[:3]), tuple(values[3:])).apply(patch)
        return patch if each.turns is None else self._turned(patch, *each.turns[number].tolist())


def _sizes(box: Box) -> tuple[int, int, int, int]:
    return box.lo[0], box.lo[1], box.hi[0] - box.lo[0], box.hi[1] - box.lo[1]
