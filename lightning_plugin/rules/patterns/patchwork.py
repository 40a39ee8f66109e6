"""Slices that a loop has cut out of one image at regular places: the same as `unfold`, and recorded as that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import canonical
from lightning_plugin.rules.pointwise import Local
from lightning_plugin.rules.slices import IndexMap
from lightning_plugin.rules.table import Recorder
from lightning_plugin.rules.views import Reshape

aten = torch.ops.aten


@dataclass(frozen=True)
class Patchwork:
    """Patches of one map, by dimension: where the first begins, how many there are, their size, and how far apart."""

    source: Value
    first: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    dims: tuple[int, ...]

    def cut(self, x: Tensor) -> Tensor:
        """The patches, one after the other, with all dimensions of the map."""
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
        """Find the map that these are patches of, in row-major order."""
        found = [box_of(v) for v in values]
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

    def patch(self) -> tuple[int, ...]:
        """The shape of a patch, with all dimensions of the map."""
        sizes = dict(zip(self.dims, self.sizes, strict=True))
        return tuple(sizes.get(d, size) for d, size in enumerate(self.source.shape))


def box_of(v: Value) -> tuple[Value, Box]:
    """The map that a map is a crop of, and the box."""
    box = Box.whole(v.space.extent)
    while v.node is not None and same_positions(v):
        source, op = v.node.inputs[0], v.node.op
        if isinstance(op, IndexMap):
            runs = [line.runs for line in op.maps]
            if any(len(here) != 1 or here[0].first is None or here[0].step != 1 for here in runs):
                break
            box = op.need(box)[0]
        elif plain_of(v) != plain_of(source):
            break
        v = source
    return v, box


def same_positions(v: Value) -> bool:
    """True of a crop of another map, or one that differs in dimensions of one position."""
    op = v.node.op if v.node is not None else None
    return isinstance(op, (IndexMap, Reshape)) or (isinstance(op, Local) and op.call.func is aten.select.int)


def plain_of(v: Value) -> list[Any]:
    """The dimensions of a map without those of one position."""
    return [dim for d in v.space.dims if (dim := canonical(d, v.space.extent))]


def patchwork(rec: Recorder, values: Sequence[Value], out: Tensor) -> Value | None:
    """Maps side by side as the patches that they are; None where they are not."""
    found = Patchwork.of(values)
    if found is None or math.prod(found.patch()) * len(values) != out.numel():
        return None
    if [size for size in found.patch() if size > 1] != [size for size in out.shape[1:] if size > 1]:
        return None
    made = rec.decompose(lambda x: found.cut(x).reshape(out.shape), found.source)
    return None if made is NotImplemented else made[0]
