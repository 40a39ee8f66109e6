"""Layouts: the axes in the dimensions of a map.

A tensor dimension is an ordered list of *factors*: plain numbers (batch, channels, heads) and axes, major first. One
image ``(N, C, H, W)`` is ``((N,), (C,), (axis 0,), (axis 1,))``; after ``flatten(2)`` it is
``((N,), (C,), (axis 0, axis 1))``; a linear layer that flattens ``(N, H, W, C)`` to rows makes
``((N, axis 0, axis 1), (C,))``. A view regroups factors and a permutation reorders dimensions. The box of a tile is
given in axes, so views and permutations do not change it.
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
    """Axis as a factor of a dimension."""

    index: int


Factor = int | Axis
Dim = tuple[Factor, ...]


def canonical(dim: Dim, extent: Sequence[int]) -> Dim:
    """Normalize a dimension: multiply neighbouring plain factors, and drop factors of size one."""
    merged: list[Factor] = []
    for f in dim:
        if isinstance(f, int) and merged and isinstance(merged[-1], int):
            merged[-1] *= f
        elif f != 1 and not (isinstance(f, Axis) and extent[f.index] == 1):
            merged.append(f)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Layout:
    """Factors of every dimension (``dims``), and extent of the map on each axis."""

    dims: tuple[Dim, ...]
    extent: tuple[int, ...]

    @staticmethod
    def channels_first(shape: Sequence[int], instances: int = 1) -> Layout:
        """Return the layout of an image: dimensions of instances (a batch, patches of a bag), channels, and space.

        Spatial axes come first. Each dimension of more than one instance has an axis after them.
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
        """Return the shape of the tile of a box."""
        return tuple(math.prod(self.sizes(dim, box)) for dim in self.dims)

    def sizes(self, dim: Dim, box: Box) -> list[int]:
        """Return the size of each factor of a dimension in the tile of a box."""
        sizes = box.extent
        return [sizes[f.index] if isinstance(f, Axis) else f for f in dim]

    def has_axis(self, dim: int) -> bool:
        return any(isinstance(f, Axis) for f in self.dims[dim])

    @property
    def axis_dims(self) -> tuple[int, ...]:
        """Dimensions that have an axis among their factors."""
        return tuple(d for d in range(len(self.dims)) if self.has_axis(d))

    def axis_of(self, dim: int) -> int | None:
        """Return the axis that is the only factor of a dimension; None for other dimensions."""
        factors = [f for f in self.dims[dim] if f != 1]
        return factors[0].index if len(factors) == 1 and isinstance(factors[0], Axis) else None

    @property
    def normalized(self) -> Layout:
        """The layout without axes of extent one, which may be anywhere after views."""
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
        """Return the layout after a view; None for an empty map, or if the view would cut an axis.

        Args:
            shape: The shape of the view.
            blocks: If given, the view may cut an axis into blocks. The axis then counts blocks, the positions in a
                block are a plain factor, and their number is added here by axis.
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
        # Axes of extent one are not in `shape`; the last dimension gets them, so that boxes keep all axes.
        while dims and factors and sizes[0] == 1:
            dims[-1] = (*dims[-1], factors.pop(0))
            sizes.pop(0)
        return None if factors else Layout(tuple(dims), tuple(extent))

    def slicer(self, held: Box, wanted: Box) -> Slicer | None:
        """Return `narrow` as a function of the tile, for all tiles with these relative positions; None if the wanted
        box is the held one."""
        if held == wanted:
            return None
        cuts: list[DimSlice] = []
        for d, dim in enumerate(self.dims):
            some = []
            for i, f in enumerate(dim):
                if isinstance(f, Axis):
                    lo, hi = wanted.lo[f.index], wanted.hi[f.index]
                    if (lo, hi) != (held.lo[f.index], held.hi[f.index]):
                        some.append((i, lo - held.lo[f.index], hi - lo))
            if some:
                cuts.append((d, tuple(self.sizes(dim, held)), tuple(some)))
        return partial(slice_tile, tuple(cuts))

    def narrow(self, tile: Tensor, held: Box, wanted: Box) -> Tensor:
        """Return the part of a tile, which holds the box ``held``, on the box ``wanted``."""
        slicer = self.slicer(held, wanted)
        return tile if slicer is None else slicer(tile)

    def add_into(self, whole: Tensor, held: Box, part: Tensor, box: Box) -> None:
        """Add the values of a tile to ``whole``, which holds the box ``held``, in place."""
        self._view_of_box(whole, held, box).add_(self.unflatten_factors(part, box))

    def write_into(self, whole: Tensor, held: Box, part: Tensor, box: Box) -> None:
        self._view_of_box(whole, held, box).copy_(self.unflatten_factors(part, box))

    def unflatten_factors(self, tile: Tensor, box: Box) -> Tensor:
        """Reshape a tile so that each factor has a dimension of its own."""
        if all(len(dim) == 1 for dim in self.dims):
            return tile
        return tile.reshape([size for dim in self.dims for size in self.sizes(dim, box)])

    def _view_of_box(self, whole: Tensor, held: Box, box: Box) -> Tensor:
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


#: Returns a part of a tile.
Slicer = Callable[[Tensor], Tensor]


#: Slice of a dimension: the dimension, the sizes of its factors, and (factor, start, length) for some of them.
DimSlice = tuple[int, tuple[int, ...], tuple[tuple[int, int, int], ...]]


def slice_tile(cuts: tuple[DimSlice, ...], tile: Tensor) -> Tensor:
    """Return a part of a tile."""
    for d, sizes, some in cuts:
        if len(sizes) > 1:
            tile = tile.unflatten(d, sizes)
        for i, start, length in some:
            tile = tile.narrow(d + i, start, length)
        if len(sizes) > 1:
            tile = tile.flatten(d, d + len(sizes) - 1)
    return plain_strides(tile)


#: PyTorch's memory formats with channels last, by the number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def plain_strides(tile: Tensor) -> Tensor:
    """Give a dense tile the strides that PyTorch gives a new tensor.

    A dimension of size one may have any stride, such as that of a tensor from which the tile was cut. With such strides
    PyTorch 2.13's BatchNorm on a CPU takes the tile for another memory format, and its backward is wrong
    (tests/lightning_plugin/test_store.py).
    """
    usual = default_strides(tile.shape, tile.stride())
    return tile if usual is None else tile.as_strided(tile.shape, usual)


@lru_cache(maxsize=4096)
def default_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides that PyTorch gives a new tensor of the same memory format; None if they are these, or if the
    tensor is not dense. Cached, since every tile of a kind asks for the same."""
    if len(shape) not in CHANNELS_LAST:
        return None
    plain = tuple(range(len(shape)))
    for order in (plain, (0, *plain[2:], 1)):
        usual = contiguous_strides(order, shape)
        if 0 in shape or all(a == b for a, b, size in zip(strides, usual, shape, strict=True) if size != 1):
            return None if strides == usual else usual
    return None


def is_dense(t: Tensor) -> bool:
    """True if a tensor's elements lie without gaps and overlaps, in any order of its dimensions."""
    dims = sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1)
    step = 1
    for stride, size in dims:
        if stride != step:
            return False
        step *= size
    return t.numel() > 0


def copy_like(t: Tensor, like: Tensor) -> Tensor:
    """Copy a tensor, with the strides of another one if that is dense."""
    if t.stride() == like.stride() or not is_dense(like):
        return t.clone()
    return torch.empty_strided(t.shape, like.stride(), dtype=t.dtype, device=t.device).copy_(t)


def contiguous_strides(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions have this order in memory."""
    found, step = [0] * len(shape), 1
    for d in reversed(order):
        found[d] = step
        step *= max(1, shape[d])
    return tuple(found)
