"""Space turned around: flips, rolls, rotations, repeats, and maps side by side."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.ops import TileOp
from lightning_plugin.rules.channels import dim_of, occupied, resized
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.slices import Run, cropped, remap, spatial
from lightning_plugin.rules.table import ATEN, Recorder, filled

aten = torch.ops.aten


@ATEN.rule(aten.flip.default)
def flip(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dims = [d % len(x.shape) for d in args[1]]
    maps = {d: cropped(x.shape[d] - 1, x.shape[d], -1) for d in dims if spatial(x, d)}
    found = remap(rec, x, maps, "flip")
    others = [d for d in dims if d not in maps]
    if found is None:
        return NotImplemented
    return local(rec, func, [found, others], {}, outs[0], found.space, name="flip") if others else found


@ATEN.rule(aten.roll.default, kind="layout")
def roll(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, shifts, dims = filled(args, None, None, [])
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims)]
    if not dims or len(set(dims)) < len(dims):
        return NotImplemented
    pairs = dict(zip(dims, shifts, strict=True))
    maps = {d: rolled(x.shape[d], s) for d, s in pairs.items() if spatial(x, d)}
    others = {d: s for d, s in pairs.items() if d not in maps}
    found = remap(rec, x, maps, "roll")
    if found is None or not others:
        return NotImplemented if found is None else found
    return local(rec, func, [found, list(others.values()), list(others)], {}, outs[0], found.space, name="roll")


def rolled(size: int, shift: int) -> tuple[Run, ...]:
    shift %= size
    return (Run(0, shift, size - shift), Run(shift, size, 0)) if shift else cropped(0, size)


@ATEN.rule(aten.repeat.default, kind="layout")
def repeat(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, times = args[0], list(args[1])
    new = len(times) - len(x.shape)
    if not all(times):
        return NotImplemented
    maps = {
        d: repeated(x.shape[d], times[d + new]) for d in range(len(x.shape)) if times[d + new] != 1 and spatial(x, d)
    }
    found = remap(rec, x, maps, "repeat")
    if found is None:
        return NotImplemented
    others = [1 if d - new in maps else n for d, n in enumerate(times)]
    dims = [(1,)] * new + list(found.space.dims)
    layout = resized(Layout(tuple(dims), found.space.extent), outs[0].shape)
    return local(rec, func, [found, others], {}, outs[0], layout, name="repeat")


def repeated(size: int, times: int) -> tuple[Run, ...]:
    if size == 1:
        return (Run(0, times, 0, 0),)
    return tuple(Run(i * size, (i + 1) * size, 0) for i in range(times))


@dataclass(frozen=True)
class Concat(TileOp):
    """Maps side by side along an axis; ``starts`` says where each begins, and ends with the whole's size."""

    kind: ClassVar[str] = "layout"
    axis: int
    dim: int
    starts: tuple[int, ...]

    def spans(self, box: Box) -> list[tuple[int, int]]:
        """Interval that each map gives, in its own positions; an empty interval where it gives nothing."""
        lo, hi = box.lo[self.axis], box.hi[self.axis]
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return [(max(lo, a) - a, min(hi, b) - a) for a, b in pairs]

    def need(self, box: Box) -> tuple[Box, ...]:
        found = []
        for i, (lo, hi) in enumerate(self.spans(box)):
            if hi <= lo:  # one position, which is dropped again: a tile is never empty
                lo = min(lo, self.starts[i + 1] - self.starts[i] - 1)
                hi = lo + 1
            found.append(box.replace(self.axis, lo, hi))
        return tuple(found)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Maps that have a share."""
        if axis != self.axis:
            return None
        return tuple(lo < end and start < hi for start, end in itertools.pairwise(self.starts))

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        given = [t for t, (lo, hi) in zip(tiles, self.spans(box), strict=True) if hi > lo]
        return given[0] if len(given) == 1 else torch.cat(given, self.dim)


@ATEN.rule(aten.cat)
def cat_space(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    values, dim = occupied(args[0]), dim_of(args, kwargs, 1) % len(outs[0].shape)
    first = next(v for v in values if v.is_map)
    axis = first.space.axis_of(dim)
    if axis is None:
        return NotImplemented
    pieces, starts = [], [0]
    for v in values:
        if len(v.shape) != len(outs[0].shape):
            return NotImplemented
        size = v.shape[dim]
        extent = (*first.space.extent[:axis], size, *first.space.extent[axis + 1 :])
        layout = first.space.with_extent(extent)
        if v.dtype != outs[0].dtype or (layout != v.space if v.is_map else layout.shape != v.shape):
            return NotImplemented
        pieces.append(v if v.is_map else rec.spread(v, layout))
        starts.append(starts[-1] + size)
    extent = (*first.space.extent[:axis], starts[-1], *first.space.extent[axis + 1 :])
    return rec.emit(Concat(axis, dim, tuple(starts)), pieces, outs, first.space.with_extent(extent), "cat")
