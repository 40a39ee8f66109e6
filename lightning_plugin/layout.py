"""Layouts: the dimensions of a map that are space.

A tensor dimension is an ordered list of *factors*: plain numbers (batch, channels, heads) and spatial axes, major
first. One image ``(N, C, H, W)`` is ``((N,), (C,), (axis 0,), (axis 1,))``; after ``flatten(2)`` it is
``((N,), (C,), (axis 0, axis 1))``; a linear layer that flattens ``(N, H, W, C)`` to rows makes
``((N, axis 0, axis 1), (C,))``. A view regroups factors and a permutation reorders dimensions, so a tile keeps its
box, which is always said in axes, whatever the user does to the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from lightning_plugin.boxes import Box


@dataclass(frozen=True, slots=True)
class Axis:
    """A spatial axis as a factor of a dimension."""

    index: int


Factor = int | Axis
Dim = tuple[Factor, ...]


def canonical(dim: Dim, extent: Sequence[int]) -> Dim:
    """A dimension's factors, plain neighbours multiplied and factors of size one dropped: equal if they act alike."""
    merged: list[Factor] = []
    for f in dim:
        if isinstance(f, int) and merged and isinstance(merged[-1], int):
            merged[-1] *= f
        elif f != 1 and not (isinstance(f, Axis) and extent[f.index] == 1):
            merged.append(f)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Layout:
    """The factors of every dimension, and the extent of the map on each axis."""

    dims: tuple[Dim, ...]
    extent: tuple[int, ...]

    @staticmethod
    def channels_first(shape: Sequence[int], instances: int = 1) -> Layout:
        """The layout of an image: dimensions of instances (a batch, patches of a bag), channels, and space.

        Space has the first axes. Instances have those after it, one for each dimension that counts more than one.
        """
        lead, channels, space = shape[:instances], shape[instances], tuple(shape[instances + 1 :])
        counts = tuple(count for count in lead if count > 1)
        axis = iter(range(len(space), len(space) + len(counts)))
        first: tuple[Dim, ...] = tuple((Axis(next(axis)),) if count > 1 else (count,) for count in lead)
        return Layout((*first, (channels,), *((Axis(i),) for i in range(len(space)))), (*space, *counts))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tile_shape(Box.whole(self.extent))

    def tile_shape(self, box: Box) -> tuple[int, ...]:
        """The shape of the tile that holds ``box``."""
        return tuple(math.prod(self.sizes(dim, box)) for dim in self.dims)

    def sizes(self, dim: Dim, box: Box) -> list[int]:
        sizes = box.extent
        return [sizes[f.index] if isinstance(f, Axis) else f for f in dim]

    def is_space(self, dim: int) -> bool:
        return any(isinstance(f, Axis) for f in self.dims[dim])

    @property
    def space(self) -> tuple[int, ...]:
        """The dimensions that have a spatial axis among their factors."""
        return tuple(d for d in range(len(self.dims)) if self.is_space(d))

    def axis_of(self, dim: int) -> int | None:
        """The axis that alone makes up a dimension, if one does."""
        factors = [f for f in self.dims[dim] if f != 1]
        return factors[0].index if len(factors) == 1 and isinstance(factors[0], Axis) else None

    @property
    def tidy(self) -> Layout:
        """The same layout without its axes of extent one, which views may have left anywhere."""
        return Layout(
            tuple(canonical(dim, self.extent) or (1,) for dim in self.dims),
            self.extent,
        )

    def with_extent(self, extent: Sequence[int]) -> Layout:
        return Layout(self.dims, tuple(extent))

    def with_dim(self, dim: int, factors: Dim) -> Layout:
        return Layout((*self.dims[:dim], factors, *self.dims[dim + 1 :]), self.extent)

    def permute(self, order: Sequence[int]) -> Layout:
        return Layout(tuple(self.dims[d] for d in order), self.extent)

    def regroup(self, shape: Sequence[int], blocks: dict[int, int] | None = None) -> Layout | None:
        """The layout after a view to ``shape``, or None where it would cut through an axis, or nothing is left.

        With ``blocks`` it may cut axes, and they get the size of a block of each that is cut: that is a plain factor
        then, inside each position of the axis, which has fewer.
        """
        extent = list(self.extent)
        factors: list[Factor] = [f for dim in self.dims for f in dim if f != 1]
        sizes: list[int] = [self.extent[f.index] if isinstance(f, Axis) else f for f in factors]
        if 0 in sizes:
            return None
        dims: list[Dim] = []
        for size in shape:
            dim: list[Factor] = []
            left = size
            if size == 1 and factors and sizes[0] == 1:
                dim.append(factors.pop(0))
                sizes.pop(0)
            while left > 1:
                if not factors:
                    return None
                if left % sizes[0] == 0:
                    left //= sizes[0]
                    dim.append(factors.pop(0))
                    sizes.pop(0)
                elif sizes[0] % left == 0 and (blocks is not None or isinstance(factors[0], int)):
                    first, rest = factors[0], sizes[0] // left
                    if isinstance(first, Axis) and blocks is not None:
                        blocks[first.index], extent[first.index] = rest, left
                    dim.append(first if isinstance(first, Axis) else left)
                    factors[0] = sizes[0] = rest
                    left = 1
                else:
                    return None
            dims.append(tuple(dim) or (1,))
        # Axes of extent one vanish in `shape`; they must live somewhere so that every box keeps all its axes.
        while dims and factors and sizes[0] == 1:
            dims[-1] = (*dims[-1], factors.pop(0))
            sizes.pop(0)
        return None if factors else Layout(tuple(dims), tuple(extent))

    def part(self, held: Box, wanted: Box) -> Part | None:
        """`narrow` for all tiles whose boxes lie like these to each other; None where the part is all of it."""
        if held == wanted:
            return None
        cuts: list[Cut] = []
        for d, dim in enumerate(self.dims):
            some = []
            for i, f in enumerate(dim):
                if isinstance(f, Axis):
                    lo, hi = wanted.lo[f.index], wanted.hi[f.index]
                    if (lo, hi) != (held.lo[f.index], held.hi[f.index]):
                        some.append((i, lo - held.lo[f.index], hi - lo))
            if some:
                cuts.append((d, tuple(self.sizes(dim, held)), tuple(some)))
        return partial(cut, tuple(cuts))

    def narrow(self, tile: Tensor, held: Box, wanted: Box) -> Tensor:
        """The part ``wanted`` of a tile that holds ``held``."""
        part = self.part(held, wanted)
        return tile if part is None else part(tile)

    def add_into(self, whole: Tensor, held: Box, part: Tensor, box: Box) -> None:
        """Add a tile's values at its box of ``whole``, which holds ``held``, in place."""
        self._writable(whole, held, box).add_(self.spread(part, box))

    def write_into(self, whole: Tensor, held: Box, part: Tensor, box: Box) -> None:
        self._writable(whole, held, box).copy_(self.spread(part, box))

    def spread(self, tile: Tensor, box: Box) -> Tensor:
        """A tile with every factor in a dimension of its own."""
        if all(len(dim) == 1 for dim in self.dims):
            return tile
        return tile.reshape([size for dim in self.dims for size in self.sizes(dim, box)])

    def _writable(self, whole: Tensor, held: Box, box: Box) -> Tensor:
        view = (
            whole.view([size for dim in self.dims for size in self.sizes(dim, held)])
            if any(len(dim) > 1 for dim in self.dims)
            else whole
        )
        factors = [f for dim in self.dims for f in dim]
        for i, f in enumerate(factors):
            if isinstance(f, Axis):
                view = view.narrow(i, box.lo[f.index] - held.lo[f.index], box.hi[f.index] - box.lo[f.index])
        return view

    def empty(self, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self.tile_shape(box), dtype=dtype, device=device)


#: Gives a part of a tile.
Part = Callable[[Tensor], Tensor]


#: A dimension that is cut: the sizes of its factors, and for some of them from where and how long.
Cut = tuple[int, tuple[int, ...], tuple[tuple[int, int, int], ...]]


def cut(cuts: tuple[Cut, ...], tile: Tensor) -> Tensor:
    """A part of a tile."""
    for d, sizes, some in cuts:
        if len(sizes) > 1:
            tile = tile.unflatten(d, sizes)
        for i, start, length in some:
            tile = tile.narrow(d + i, start, length)
        if len(sizes) > 1:
            tile = tile.flatten(d, d + len(sizes) - 1)
    return plain_strides(tile)


#: PyTorch's memory formats of tensors of these ranks whose channels lie last in memory.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def plain_strides(tile: Tensor) -> Tensor:
    """A tile without gaps in memory, with the strides that PyTorch gives such a tensor itself.

    A dimension of size one may have any stride, that of the tensor it was cut from, say. PyTorch 2.13's BatchNorm on a
    CPU takes such a tensor for what it is not, and its backward is wrong (tests/lightning_plugin/test_store.py).
    """
    usual = usual_strides(tile.shape, tile.stride())
    return tile if usual is None else tile.as_strided(tile.shape, usual)


@lru_cache(maxsize=4096)
def usual_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides that PyTorch would give a tensor that lies in memory like one of these, where they are others. Every
    tile of a kind asks again, of each BatchNorm."""
    if len(shape) not in CHANNELS_LAST:
        return None
    plain = tuple(range(len(shape)))
    for order in (plain, (0, *plain[2:], 1)):
        usual = strides_in(order, shape)
        if 0 in shape or all(a == b for a, b, size in zip(strides, usual, shape, strict=True) if size != 1):
            return None if strides == usual else usual
    return None


def strides_in(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions lie in this order."""
    found, step = [0] * len(shape), 1
    for d in reversed(order):
        found[d] = step
        step *= max(1, shape[d])
    return tuple(found)
