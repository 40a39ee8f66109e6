"""Axes that no tile cuts from some operator on, and axes that are put together to one.

An operator that *mixes* a dimension needs all of it in each tile. Where an axis lies there, the map is *uncut* along
it: the axis becomes a plain factor, and a tile holds all its positions. Several axes that share a dimension, as the
tokens of an image do, are *flattened* to one where an operator asks for positions along the dimension itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Dim, Layout
from lightning_plugin.ops import TileOp
from lightning_plugin.rules.table import Recorder


@dataclass(frozen=True)
class Uncut(TileOp):
    """The same tensor; ``axes`` of the input, of so many positions each, are plain factors of the output."""

    kind: ClassVar[str] = "layout"
    uniform: ClassVar[bool] = True
    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        for a, size in zip(self.axes, self.sizes, strict=True):
            box = box.replace(a, 0, size)
        return (box,)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return None

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return tiles[0]


@dataclass(frozen=True)
class Entire(Uncut):
    """A map of which nothing is left to cut, for an operator that reads all of it in each tile: keys, say.

    See [Note: entire] in `program.fixed`.
    """


def uncut(rec: Recorder, value: Value, axes: Collection[int], entire: bool = False) -> Value:
    """A map whose axes are cut by no tile; the value itself where it has none. Where none is left to cut it is a
    vector, or as a map `Entire`, if that is asked for."""
    layout = value.layout
    if layout is None:
        return value
    whole = tuple(a for a in sorted(axes) if layout.extent[a] > 1)
    if not whole:
        return value
    all_of_it = all(size == 1 or a in whole for a, size in enumerate(layout.extent))
    if all_of_it and not entire:
        return rec.gather(value)
    sizes = tuple(layout.extent[a] for a in whole)
    dims = tuple(tuple(plain_factor(f, layout, whole) for f in dim) for dim in layout.dims)
    extent = tuple(1 if a in whole else size for a, size in enumerate(layout.extent))
    op = (Entire if all_of_it else Uncut)(whole, sizes)
    return rec.emit(op, [value], [value.fake], Layout(dims, extent), "uncut")[0]


def plain_factor(factor: int | Axis, layout: Layout, whole: Collection[int]) -> int | Axis:
    return layout.extent[factor.index] if isinstance(factor, Axis) and factor.index in whole else factor


def axes_under(value: Value, dims: Collection[int]) -> set[int]:
    """The axes of more than one position under some dimensions of a map."""
    if value.layout is None:
        return set()
    layout = value.layout
    found = {f.index for d in dims for f in layout.dims[d % len(layout.dims)] if isinstance(f, Axis)}
    return {a for a in found if layout.extent[a] > 1}


@dataclass(frozen=True)
class Flatten(TileOp):
    """Dimension ``dim``, an axis with factors inside it, as the axis alone: its positions are those of all of them.

    ``inner`` are the positions inside one of the axis; ``axes`` inside it are not cut.
    """

    kind: ClassVar[str] = "layout"
    uniform: ClassVar[bool] = True
    axis: int
    dim: int
    inner: int
    axes: tuple[tuple[int, int], ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        lo, hi = box.lo[self.axis], box.hi[self.axis]
        box = box.replace(self.axis, lo // self.inner, -(-hi // self.inner))
        for a, size in self.axes:
            box = box.replace(a, 0, size)
        return (box,)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Offset of the tile in its first position of the axis."""
        return lo % self.inner if axis == self.axis else None

    @property
    def returns_view(self) -> bool:
        return True

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        lo, hi = box.lo[self.axis], box.hi[self.axis]
        return tiles[0].narrow(self.dim, lo % self.inner, hi - lo)


def flatten_dim(rec: Recorder, value: Value, dim: int) -> Value | None:
    """A map whose dimension is one axis, made of all the factors there; None where it does not begin with an axis."""
    layout = value.space
    dim %= len(layout.dims)
    factors = [f for f in layout.dims[dim] if f != 1 and not (isinstance(f, Axis) and layout.extent[f.index] == 1)]
    if not factors or not isinstance(factors[0], Axis):
        return None
    if len(factors) == 1:
        return value
    axis = factors[0].index
    inside = tuple((f.index, layout.extent[f.index]) for f in factors[1:] if isinstance(f, Axis))
    inner = math.prod(layout.extent[f.index] if isinstance(f, Axis) else f for f in factors[1:])
    gone = {a for a, _ in inside}
    extent = list(layout.extent)
    extent[axis] *= inner
    for a in gone:
        extent[a] = 1
    dims: list[Dim] = [
        tuple(f for f in d if not (isinstance(f, Axis) and f.index in gone)) or (1,) for d in layout.dims
    ]
    dims[dim] = (Axis(axis),)
    op = Flatten(axis, dim, inner, inside)
    return rec.emit(op, [value], [value.fake], Layout(tuple(dims), tuple(extent)), "flatten")[0]


def alternatives(rec: Recorder, values: Sequence[Value], whole_call: bool) -> Iterator[dict[Value, Value]]:
    """Replacements for the maps of a call whose rule declines them as they are.

    Several axes in one dimension become one. So do an axis and the plain factors inside it, where maps differ in that:
    the same positions may be one axis of one map and several factors of another. Where images are tiled among each
    other and in space, either is given up: first the one of fewer positions, and of a call that is known as a whole,
    only that: its pieces may do with less. Last, axes are given up that follow another factor in their dimension. A
    call of which no map would be left is a barrier, and is said to be one.
    """
    maps = [v for v in values if v.is_map]
    flat = {v: flatten_dims(rec, v, 2) for v in maps}
    if any(flat[v] is not v for v in maps):
        yield flat
        maps = list(flat.values())
    if len({v.space.extent for v in maps}) > 1:
        lines = {key: flatten_dims(rec, v, 1) for key, v in zip(flat, maps, strict=True)}
        if any(lines[key] is not v for key, v in flat.items()):
            yield lines
    given = dict(zip(flat, maps, strict=True))
    long = {a: size for v in maps for a, size in enumerate(v.space.extent) if size > 1}
    counting = {a for a in long if a in rec.session.instance_axes}
    either = sorted((counting, long.keys() - counting), key=lambda some: math.prod(long[a] for a in some))
    for axes in either[:1] if whole_call and all(either) else either:
        if axes and long.keys() - axes:
            yield {key: uncut(rec, v, [a for a in axes if a < len(v.space.extent)]) for key, v in given.items()}
    inner = {a for v in maps for a in inner_axes(v)}
    if inner and inner not in either and long.keys() - inner:
        yield {key: uncut(rec, v, inner) for key, v in given.items()}


def inner_axes(value: Value) -> set[int]:
    """The axes of more than one position that follow another factor of their dimension."""
    return {f.index for dim in value.space.normalized.dims for f in dim[1:] if isinstance(f, Axis)}


def flatten_dims(rec: Recorder, value: Value, axes: int) -> Value:
    """A map whose dimensions of so many axes, or more, are one axis each, as far as can be."""
    for d in range(len(value.shape)):
        if len(axes_under(value, [d])) >= axes:
            value = flatten_dim(rec, value, d) or value
    return value
