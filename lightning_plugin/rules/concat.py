"""Concatenation along an axis, along plain dimensions, and of images to a batch.

Patches that a loop slices from one image at regular distances are recorded as `Tensor.unfold`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Layout, canonical
from lightning_plugin.ops import TileOp
from lightning_plugin.rules.channels import arguments, resized
from lightning_plugin.rules.pointwise import Local, ZeroGradient, local, spread
from lightning_plugin.rules.reductions import nothing
from lightning_plugin.rules.slices import IndexMap
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.views import Reshape

aten = torch.ops.aten


@dataclass(frozen=True)
class Concat(TileOp):
    """Concatenation of maps along an axis.

    Attributes:
        axis: The axis.
        dim: Its dimension.
        starts: Start of each map in the result, and the size of the result.
    """

    kind: ClassVar[str] = "layout"
    axis: int
    dim: int
    starts: tuple[int, ...]

    def spans(self, box: Box) -> list[tuple[int, int]]:
        """Return the interval of each map, in its own positions, that is in a box; it may be empty."""
        lo, hi = box.lo[self.axis], box.hi[self.axis]
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return [(max(lo, a) - a, min(hi, b) - a) for a, b in pairs]

    def need(self, box: Box) -> tuple[Box, ...]:
        found = []
        for i, (lo, hi) in enumerate(self.spans(box)):
            if hi <= lo:  # one position, which `apply` drops: a tile is never empty
                lo = min(lo, self.starts[i + 1] - self.starts[i] - 1)
                hi = lo + 1
            found.append(box.replace(self.axis, lo, hi))
        return tuple(found)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Mask of the maps that are in the interval."""
        if axis != self.axis:
            return None
        return tuple(lo < end and start < hi for start, end in itertools.pairwise(self.starts))

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        given = [t for t, (lo, hi) in zip(tiles, self.spans(box), strict=True) if hi > lo]
        return given[0] if len(given) == 1 else torch.cat(given, self.dim)


@dataclass(frozen=True)
class AsInstance(Reshape):
    """Change of layout: the map gets one more axis, of one position, as its first dimension."""

    def need(self, box: Box) -> tuple[Box, ...]:
        return (Box(box.lo[:-1], box.hi[:-1]),)


@ATEN.rule(aten.cat, kind="layout")
def cat(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    dim = arguments(func, args, kwargs)["dim"] % len(outs[0].shape)
    values = [v for v in args[0] if 0 not in v.shape]
    empty = [v for v in args[0] if 0 in v.shape and v.requires_grad and not shares_gradients(v, values)]
    if not empty or not rec.grad:
        return concatenated(rec, func, values, dim, outs)
    how = outs[0].dtype, outs[0].device
    found = concatenated(rec, func, values, dim, [rec.fake(outs[0].shape, *how)])
    if found is NotImplemented:
        return NotImplemented
    made = found if isinstance(found, Value) else found[0]
    zeros = nothing(rec, empty, rec.fake((0,), *how))
    return local(rec, ZeroGradient.apply, [zeros, made], {}, outs[0], made.space, name="cat")


def concatenated(rec: Recorder, func: Any, values: Sequence[Value], dim: int, outs: Sequence[Tensor]) -> Any:
    """Record a concatenation of values that have elements."""
    if dim == 0 and (found := stack_images(rec, values, outs[0], 1)) is not NotImplemented:
        return found
    first = next(v for v in values if v.is_map)
    if first.space.has_axis(dim):
        return concat_along_axis(rec, values, first.space, dim, outs)
    layout = resized(first.space, outs[0].shape)
    space = set(layout.axis_dims)
    values = [v if v.is_map else spread(rec, v, resized(first.space, v.shape), space) for v in values]
    if any(not v.is_map or resized(v.space, outs[0].shape).normalized != layout.normalized for v in values):
        return NotImplemented
    return local(rec, func, [values, dim], {}, outs[0], layout, name="cat")


def concat_along_axis(rec: Recorder, values: Sequence[Value], lies: Layout, dim: int, outs: Sequence[Tensor]) -> Any:
    """Record a concatenation along an axis of maps, and of vectors that fit their layout ``lies``."""
    axis = lies.axis_of(dim)
    if axis is None:
        return NotImplemented
    extents = [(*lies.extent[:axis], v.shape[dim], *lies.extent[axis + 1 :]) for v in values]
    layouts = [lies.with_extent(extent) for extent in extents]
    for v, layout in zip(values, layouts, strict=True):
        if v.dtype != outs[0].dtype or (layout != v.space if v.is_map else layout.shape != v.shape):
            return NotImplemented
    maps = [v if v.is_map else rec.spread(v, layout) for v, layout in zip(values, layouts, strict=True)]
    starts = tuple(itertools.accumulate((v.shape[dim] for v in values), initial=0))
    extent = (*lies.extent[:axis], starts[-1], *lies.extent[axis + 1 :])
    return rec.emit(Concat(axis, dim, starts), maps, outs, lies.with_extent(extent), "cat")


def shares_gradients(empty: Value, values: Sequence[Value]) -> bool:
    """True if what an empty value was made of gets a gradient from one of these values, too."""
    made_of: set[Value] = set()
    todo = [empty]
    while todo:
        v = todo.pop()
        if 0 not in v.shape:
            made_of.add(v)
        elif v.node is not None:
            todo += [i for i in v.node.inputs if i.requires_grad]
    first = min((v.node.serial if v.node is not None else 0 for v in made_of), default=0)
    reached: set[Value] = set()
    todo = [v for v in values if v.requires_grad]
    while todo and not made_of <= reached:
        v = todo.pop()
        if v not in reached:
            reached.add(v)
            if v.node is not None and v.node.serial >= first:
                todo += [i for i in v.node.inputs if i.requires_grad]
    return made_of <= reached


@ATEN.rule(aten.stack, kind="local")
def stack(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    values, dim = list(args[0]), arguments(func, args, kwargs)["dim"] % len(outs[0].shape)
    if dim == 0 and (found := stack_images(rec, values, outs[0], 0)) is not NotImplemented:
        return found
    if any(not v.is_map or v.space != values[0].space for v in values):
        return NotImplemented
    dims = list(values[0].space.dims)
    dims.insert(dim, (len(values),))
    return local(rec, func, [values, dim], {}, outs[0], Layout(tuple(dims), values[0].space.extent), name="stack")


def stack_images(rec: Recorder, values: Sequence[Value], out: Tensor, lead: int) -> Any:
    """Record maps of one image each as a batch, with an axis of images.

    Args:
        rec: The recorder.
        values: The maps.
        out: The result.
        lead: Number of their first dimensions that count images: 1 for `torch.cat`, 0 for `torch.stack`.
    """
    if len(values) < 2 or not all(v.is_map for v in values):
        return NotImplemented
    if (patches := patchwork(rec, values, out)) is not None:
        return patches
    first = values[0]
    if any(v.space != first.space or v.dtype != out.dtype for v in values):
        return NotImplemented
    extent = first.space.extent
    layout = Layout(((Axis(len(extent)),), *first.space.normalized.dims[lead:]), (*extent, 1))
    if (lead and first.shape[0] != 1) or layout.shape != (1, *out.shape[1:]):
        return NotImplemented
    fakes = [rec.fake(layout.shape, v.dtype, v.device) for v in values]
    pairs = zip(values, fakes, strict=True)
    several = [rec.emit(AsInstance(layout), [v], [fake], layout, "image")[0] for v, fake in pairs]
    rec.session.instance_axes.add(len(extent))
    op = Concat(len(extent), 0, tuple(range(len(values) + 1)))
    return rec.emit(op, several, [out], layout.with_extent((*extent, len(values))), "cat")


# Patches that a loop has cut out -------------------------------------------------------------------------


@dataclass(frozen=True)
class Patchwork:
    """Patches of one map on a regular grid.

    Attributes:
        source: The map.
        first: Start of the first patch in each dimension of the grid.
        counts: Number of patches.
        sizes: Size of a patch.
        steps: Distance of patches.
        dims: Dimensions of the grid.
    """

    source: Value
    first: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    dims: tuple[int, ...]

    def cut(self, x: Tensor) -> Tensor:
        """Return the patches of a tensor in row-major order, along a new first dimension."""
        last = x.dim()
        for d, first, count, size, step in zip(
            self.dims, self.first, self.counts, self.sizes, self.steps, strict=True
        ):  # fmt: skip
            span = (count - 1) * step + size
            x = (x if span == x.shape[d] else x.narrow(d, first, span)).unfold(d, size, step)
        inner = [last + self.dims.index(d) if d in self.dims else d for d in range(last)]
        return x.permute(*self.dims, *inner).flatten(0, len(self.dims) - 1)

    @staticmethod
    def of(values: Sequence[Value]) -> Patchwork | None:
        """Return the grid whose patches, in row-major order, are these values; None if there is none."""
        found = [crop_origin(v) for v in values]
        source, first = found[0]
        axes = [source.space.axis_of(d) for d in range(len(source.shape))]
        whole = source.space.extent
        dims = tuple(d for d, a in enumerate(axes) if a is not None and first.extent[a] < whole[a])
        known = {axes[d] for d in dims}
        if any(v is not source or box.extent != first.extent for v, box in found) or not dims:
            return None
        if any(size < whole[a] and a not in known for a, size in enumerate(first.extent)):
            return None  # an axis that shares its dimension
        starts = [sorted({box.lo[axes[d]] for _, box in found}) for d in dims]  # type: ignore[index]
        steps = [{b - a for a, b in itertools.pairwise(here)} or {1} for here in starts]
        order = [tuple(box.lo[axes[d]] for d in dims) for _, box in found]  # type: ignore[index]
        if any(len(some) > 1 for some in steps) or order != list(itertools.product(*starts)):
            return None
        sizes = tuple(first.extent[axes[d]] for d in dims)  # type: ignore[index]
        return Patchwork(
            source, tuple(s[0] for s in starts), tuple(map(len, starts)), sizes, tuple(s.pop() for s in steps), dims
        )

    def patch_shape(self) -> tuple[int, ...]:
        """Return the shape of a patch, with all dimensions of the map."""
        sizes = dict(zip(self.dims, self.sizes, strict=True))
        return tuple(sizes.get(d, size) for d, size in enumerate(self.source.shape))


def crop_origin(v: Value) -> tuple[Value, Box]:
    """Return the map that a map was cropped from, and the box of the crop."""
    box = Box.whole(v.space.extent)
    while v.node is not None and is_crop(v):
        source, op = v.node.inputs[0], v.node.op
        if isinstance(op, IndexMap):
            runs = [line.runs for line in op.maps]
            if any(len(here) != 1 or here[0].first is None or here[0].step != 1 for here in runs):
                break
            box = op.need(box)[0]
        elif long_dims(v) != long_dims(source):
            break
        v = source
    return v, box


def is_crop(v: Value) -> bool:
    """True if a map is a crop of another, or another with dimensions of size one added or removed."""
    op = v.node.op if v.node is not None else None
    return isinstance(op, (IndexMap, Reshape)) or (isinstance(op, Local) and op.call.func is aten.select.int)


def long_dims(v: Value) -> list[Any]:
    """Return the dimensions of a map, apart from those of size one."""
    return [dim for d in v.space.dims if (dim := canonical(d, v.space.extent))]


def patchwork(rec: Recorder, values: Sequence[Value], out: Tensor) -> Value | None:
    """Record patches of one map as `Tensor.unfold`; None if the values are not patches of one map."""
    found = Patchwork.of(values)
    if found is None or math.prod(found.patch_shape()) * len(values) != out.numel():
        return None
    if [size for size in found.patch_shape() if size > 1] != [size for size in out.shape[1:] if size > 1]:
        return None
    made = rec.decompose(lambda x: found.cut(x).reshape(out.shape), found.source)
    return None if made is NotImplemented else made[0]
