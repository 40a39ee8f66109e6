"""Maps with fewer axes, for operators that cannot handle all axes of their input.

An operator that mixes a dimension needs all of it in each tile. If an axis lies there, the map may be *uncut* along it:
the axis becomes a plain factor, and a tile holds all its positions. Several axes in one dimension, such as rows and
columns in the tokens of an image, may be *flattened* to one axis, for operators that slide or index along it.
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
    """Change of layout: axes of the input are plain factors of the output, which is the same tensor.

    Attributes:
        axes: The axes.
        sizes: Positions of each.
    """

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
    """Map that every tile reads whole: keys and values of attention. See [Note: entire] in `program.fixed`."""


def uncut(rec: Recorder, value: Value, axes: Collection[int], entire: bool = False) -> Value:
    """Return a map without some axes.

    Args:
        rec: The recorder.
        value: The map; a vector is returned unchanged.
        axes: The axes.
        entire: If no other axis is left, return a map (`Entire`) and not a vector.
    """
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
    dims = tuple(
        tuple(sizes[whole.index(f.index)] if isinstance(f, Axis) and f.index in whole else f for f in dim)
        for dim in layout.dims
    )
    extent = tuple(1 if a in whole else size for a, size in enumerate(layout.extent))
    op = (Entire if all_of_it else Uncut)(whole, sizes)
    return rec.emit(op, [value], [value.fake], Layout(dims, extent), "uncut")[0]


def axes_under(value: Value, dims: Collection[int]) -> set[int]:
    """Return the axes in some dimensions of a map, apart from those of one position."""
    if value.layout is None:
        return set()
    layout = value.layout
    found = {f.index for d in dims for f in layout.dims[d % len(layout.dims)] if isinstance(f, Axis)}
    return {a for a in found if layout.extent[a] > 1}


@dataclass(frozen=True)
class Flatten(TileOp):
    """Change of layout: a dimension, an axis with further factors, becomes one axis with the positions of all factors.

    Attributes:
        axis: The axis.
        dim: The dimension.
        inner: Product of the further factors: positions in one position of the input's axis.
        axes: Further axes in the dimension with their sizes; a tile of the input has all of them.
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
        """Offset of the tile in the first position of the input's axis."""
        return lo % self.inner if axis == self.axis else None

    @property
    def returns_view(self) -> bool:
        return True

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        lo, hi = box.lo[self.axis], box.hi[self.axis]
        return tiles[0].narrow(self.dim, lo % self.inner, hi - lo)


def flatten_dim(rec: Recorder, value: Value, dim: int) -> Value | None:
    """Return a map whose dimension is one axis, made of all its factors; None if the first factor is not an axis."""
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
    """Yield replacements, with fewer axes, for the maps of a call that its rule declined, in this order:

    1. Several axes in one dimension are flattened.
    2. If the extents of maps differ, an axis and plain factors in one dimension are flattened too: one map may have
       several factors where another has one axis.
    3. Maps are uncut along images or along space, whichever has fewer positions first. If the rule is that of the
       whole call, only the first is tried: the rules of its operators may need fewer axes uncut.
    4. Maps are uncut along axes that follow another factor in their dimension.

    A replacement leaves at least one axis: otherwise the call is a barrier.
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
    """Return the axes of more than one position that follow another factor of their dimension."""
    return {f.index for dim in value.space.normalized.dims for f in dim[1:] if isinstance(f, Axis)}


def flatten_dims(rec: Recorder, value: Value, axes: int) -> Value:
    """Flatten each dimension of at least ``axes`` axes, if its first factor is an axis."""
    for d in range(len(value.shape)):
        if len(axes_under(value, [d])) >= axes:
            value = flatten_dim(rec, value, d) or value
    return value
