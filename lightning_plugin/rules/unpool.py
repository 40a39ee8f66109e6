"""Max unpooling of what a max pooling pooled: each value goes back to where its window found it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Along
from lightning_plugin.rules.pooling import MaxPoolIndices
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.transposed import Stamp
from lightning_plugin.rules.window import axes_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Unpool(Along):
    """Maps: values and indices, the latter flat positions in the whole map of ``extent``."""

    kind: ClassVar[str] = "resample"
    extent: tuple[int, ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        """The windows, which do not overlap, that have a position in the box."""
        return super().need(box) * 2

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return lo, hi

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x, where = tiles
        count = len(self.axes)
        inside = torch.ones_like(where, dtype=torch.bool)
        place, step = torch.zeros_like(where), 1
        for a in reversed(self.axes):
            at = where % self.extent[a] - box.lo[a]
            where = where // self.extent[a]
            size = box.hi[a] - box.lo[a]
            inside &= (at >= 0) & (at < size)
            place = place + at * step
            step *= size
        # What lies outside of the box goes to one place behind it, which is cut off.
        place = torch.where(inside, place, step).flatten(-count)
        out = x.new_zeros(*x.shape[:-count], step + 1).scatter(-1, place, x.flatten(-count))
        return out[..., :step].unflatten(-1, [box.hi[a] - box.lo[a] for a in self.axes])


@ATEN.rule(aten.max_unpool2d.default, aten.max_unpool3d.default, kind="resample")
def max_unpool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Only with the indices of a pooling without overlaps, to the size that was pooled."""
    x, indices, size = args[0], args[1], tuple(args[2])
    pool = made_by(indices)
    axes = axes_of(x, len(size)) if x.is_map else None
    if pool is None or axes is None or axes != pool.axes or indices.space.extent != x.space.extent:
        return NotImplemented
    extent = pool.extent
    if tuple(extent[a] for a in axes) != size or any(w.kernel > w.stride or w.dilation != 1 for w in pool.windows):
        return NotImplemented
    stamps = tuple(
        Stamp(w.kernel, w.stride, 1, w.before, x.space.extent[a]) for w, a in zip(pool.windows, axes, strict=True)
    )
    op = Unpool(stamps, axes, extent)
    return rec.emit(op, [x, indices], outs, Layout(x.space.dims, extent), "max_unpool")[0]


def made_by(indices: Value) -> MaxPoolIndices | None:
    """The pooling that indices come from."""
    op = indices.node.op if indices.is_map and indices.node is not None else None
    return op if isinstance(op, MaxPoolIndices) else None
