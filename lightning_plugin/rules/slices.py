"""Slices, flips, rolls, repeats and padding: an output position is one input position, or a constant.

These operators differ only in the map from output positions to input positions on each axis, which consists of a few
linear *runs*. A tile reads the smallest interval with the inputs of all its runs, and takes slices of it. (A tile with
both ends of a roll or of a circular padding reads the whole axis, since a box has no hole.)

Selected rows and splits are slices. A write through a view (see [Note: views] in `capture.alias`) is a concatenation of
the parts before, in and behind the view.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.ops import SeparableOp
from lightning_plugin.private import operator_name
from lightning_plugin.rules.channels import arguments, is_plain, local_on_plain, over_last_dims, resized
from lightning_plugin.rules.pointwise import local, zero_gradient
from lightning_plugin.rules.table import API, ATEN, Recorder
from lightning_plugin.rules.views import Expand, reshape_map

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs ``lo <= o < hi`` are inputs ``first + step * (o - lo)``; without ``first``, a constant."""

    lo: int
    hi: int
    first: int | None
    step: int = 1

    def clip(self, lo: int, hi: int) -> Run | None:
        """Return the part of the run with outputs in ``[lo, hi)``; None if it is empty."""
        start, end = max(lo, self.lo), min(hi, self.hi)
        if end <= start:
            return None
        first = None if self.first is None else self.first + self.step * (start - self.lo)
        return Run(start, end, first, self.step)

    @property
    def reach(self) -> tuple[int, int] | None:
        """Interval of the inputs of the run; None for a constant."""
        if self.first is None:
            return None
        last = self.first + self.step * (self.hi - self.lo - 1)
        return min(self.first, last), max(self.first, last) + 1

    def take(self, x: Tensor, dim: int, origin: int, fill: float) -> Tensor:
        """Return the outputs of the run, from a tile whose first position along ``dim`` is ``origin``."""
        count = self.hi - self.lo
        reach = self.reach
        if reach is None:
            return x.new_full((*x.shape[:dim], count, *x.shape[dim + 1 :]), fill)
        part = x.narrow(dim, reach[0] - origin, reach[1] - reach[0])
        if self.step == 0:
            return part.expand(*x.shape[:dim], count, *x.shape[dim + 1 :])
        if abs(self.step) > 1:
            part = part[(slice(None),) * dim + (slice(None, None, abs(self.step)),)]
        return part.flip(dim) if self.step < 0 and count > 1 else part


Runs = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """Index arithmetic of one axis.

    Attributes:
        dim: Dimension of the axis.
        size: Number of inputs.
        runs: The runs, in the order of outputs.
    """

    dim: int
    size: int
    runs: Runs

    def parts(self, lo: int, hi: int) -> list[Run]:
        return [part for run in self.runs if (part := run.clip(lo, hi)) is not None]

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the interval of inputs of outputs ``[lo, hi)``; one input, not used, if all outputs are constant."""
        reaches = [reach for part in self.parts(lo, hi) if (reach := part.reach) is not None]
        if not reaches:
            at = min(lo, self.size - 1)
            return at, at + 1
        return min(r[0] for r in reaches), max(r[1] for r in reaches)

    def mark(self, lo: int, hi: int) -> Hashable:
        """Runs, relative to the first output and the first input."""
        first = self.need(lo, hi)[0]
        return tuple(
            (p.lo - lo, p.hi - lo, None if p.first is None else p.first - first, p.step) for p in self.parts(lo, hi)
        )


@dataclass(frozen=True)
class IndexMap(SeparableOp):
    """Index maps along some axes; constants are ``fill``."""

    kind: ClassVar[str] = "layout"
    maps: tuple[Line, ...]
    fill: float = 0.0

    def is_concatenation(self, box: Box) -> bool:
        return any(len(line.parts(lo, hi)) > 1 for line, (lo, hi) in zip(self.maps, self.intervals(box), strict=True))

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        for line, (lo, hi) in zip(self.maps, self.intervals(box), strict=True):
            origin = line.need(lo, hi)[0]
            pieces = [part.take(x, line.dim, origin, self.fill) for part in line.parts(lo, hi)]
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, line.dim)
        return x


def crop_runs(start: int, count: int, step: int = 1) -> Runs:
    """Return the runs of a slice."""
    return (Run(0, count, start, step),)


def needs_index_map(x: Value, dim: int) -> bool:
    """True if an index map is needed along a dimension: it is one axis, or has an axis of several positions."""
    return x.space.axis_of(dim) is not None or not is_plain(x, dim)


def remap(rec: Recorder, x: Value, maps: Mapping[int, Runs], name: str, fill: float = 0.0) -> Value | None:
    """Record index maps along dimensions; None if a dimension is not exactly one axis, or the result would be empty."""
    if not maps:
        return x
    extent, shape = list(x.space.extent), list(x.shape)
    lines: dict[int, Line] = {}
    for dim, runs in maps.items():
        axis = x.space.axis_of(dim)
        if axis is None or not runs or runs[-1].hi == 0:
            return None
        lines[axis] = Line(dim, extent[axis], runs)
        extent[axis] = shape[dim] = runs[-1].hi
    out = rec.fake(shape, x.dtype, x.device)
    return rec.emit(IndexMap(tuple(lines.values()), tuple(lines), fill), [x], [out], x.space.with_extent(extent), name)[
        0
    ]


def or_decline(value: Value | None) -> Any:
    return NotImplemented if value is None else value


@ATEN.rule(aten.slice.Tensor, kind="local or layout")
def crop(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, *ends = arguments(func, args, kwargs).values()
    found = local_on_plain(rec, func, args, kwargs, outs, [dim])
    if found is not NotImplemented:
        return found
    dim %= len(x.shape)
    first, stop, step = slice(*ends).indices(x.shape[dim])
    return or_decline(remap(rec, x, {dim: crop_runs(first, len(range(first, stop, step)), step)}, "slice"))


@ATEN.rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, kind="local or layout")
def split(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Each part is a slice of its own, so that it does not keep the others alive."""
    x, dim = args[0], arguments(func, args, kwargs)["dim"]
    if func is aten.unbind.int:
        return rec.decompose(lambda x: tuple(x.select(dim, i) for i in range(len(outs))), x)
    sizes = [out.shape[dim] for out in outs]
    starts = [0, *itertools.accumulate(sizes)]
    return rec.decompose(lambda x: tuple(map(partial(x.narrow, dim), starts, sizes)), x)


@ATEN.rule(aten.select.int, kind="local or layout")
def select(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    found = local_on_plain(rec, func, args, kwargs, outs, [args[1]])
    return or_decline(select_row(rec, args[0], args[1], args[2], outs[0])) if found is NotImplemented else found


def select_row(rec: Recorder, x: Value, dim: int, index: int, out: Tensor) -> Value | None:
    """Record `Tensor.select` of one position; a dimension of several axes is unflattened before."""
    dim %= len(x.shape)
    index %= x.shape[dim]
    factors = x.space.dims[dim]
    if any(not isinstance(f, Axis) for f in factors):
        return None
    spread = Layout((*x.space.dims[:dim], *((f,) for f in factors), *x.space.dims[dim + 1 :]), x.space.extent)
    if len(factors) > 1:
        x = reshape_map(rec, x, spread)
    maps = {}
    for d in reversed(range(dim, dim + len(factors))):
        index, at = divmod(index, x.shape[d])
        maps[d] = crop_runs(at, 1)
    one = remap(rec, x, maps, "select")
    layout = None if one is None else one.space.regroup(tuple(out.shape))
    if one is None or layout is None:
        return None
    found = reshape_map(rec, one, layout, "select")
    return found if any(size > 1 for size in layout.extent) else rec.gather(found)


@ATEN.rule(aten.slice_scatter.default, kind="local or layout")
def slice_scatter(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Concatenate the part before the slice, the new part, and the part behind it."""
    x, part, dim, *ends = arguments(func, args, kwargs).values()
    dim %= len(outs[0].shape)
    start, stop, step = slice(*ends).indices(x.shape[dim])
    if step != 1:
        return NotImplemented
    return replace_part(rec, x, part, dim, start, max(start, stop), outs[0])


@ATEN.rule(aten.select_scatter.default, kind="local or layout")
def select_scatter(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The same, for one position."""
    x, part, dim, index = args
    dim %= len(outs[0].shape)
    index %= x.shape[dim]
    found = rec.decompose(lambda part: part.unsqueeze(dim), part)
    return found if found is NotImplemented else replace_part(rec, x, found[0], dim, index, index + 1, outs[0])


def replace_part(rec: Recorder, x: Value, part: Value, dim: int, start: int, stop: int, out: Tensor) -> Any:
    """Record ``x`` with ``part`` from ``start`` to ``stop``."""
    after = x.shape[dim] - stop
    if not start and not after:
        needs = rec.grad and x.requires_grad
        found = rec.decompose(lambda part: part.clone(), part)
        return zero_gradient(rec, x, found[0], out) if found is not NotImplemented and needs else found

    def pieces(x: Tensor, part: Tensor) -> Tensor:
        before, behind = [x.narrow(dim, 0, start)], [x.narrow(dim, stop, after)]
        return torch.cat([*before[: bool(start)], part, *behind[: bool(after)]], dim)

    return rec.decompose(pieces, x, part)


# Flips, rolls, repeats --------------------------------------------------------------------------------------


@ATEN.rule(aten.flip.default)
def flip(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dims = [d % len(x.shape) for d in args[1]]
    maps = {d: crop_runs(x.shape[d] - 1, x.shape[d], -1) for d in dims if needs_index_map(x, d)}
    found = remap(rec, x, maps, "flip")
    others = [d for d in dims if d not in maps]
    if found is None:
        return NotImplemented
    return local(rec, func, [found, others], {}, outs[0], found.space, name="flip") if others else found


@ATEN.rule(aten.roll.default, kind="layout")
def roll(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, shifts, dims = arguments(func, args, kwargs).values()
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims)]
    if not dims or len(set(dims)) < len(dims):
        return NotImplemented
    pairs = dict(zip(dims, shifts, strict=True))
    maps = {d: roll_runs(x.shape[d], s) for d, s in pairs.items() if needs_index_map(x, d)}
    others = {d: s for d, s in pairs.items() if d not in maps}
    found = remap(rec, x, maps, "roll")
    if found is None or not others:
        return NotImplemented if found is None else found
    return local(rec, func, [found, list(others.values()), list(others)], {}, outs[0], found.space, name="roll")


def roll_runs(size: int, shift: int) -> tuple[Run, ...]:
    shift %= size
    return (Run(0, shift, size - shift), Run(shift, size, 0)) if shift else crop_runs(0, size)


@ATEN.rule(aten.repeat.default, kind="layout", enlarges=True)
def repeat(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, times = args[0], list(args[1])
    new = len(times) - len(x.shape)
    if not all(times):
        return NotImplemented
    maps = {
        d: repeat_runs(x.shape[d], times[d + new])
        for d in range(len(x.shape))
        if times[d + new] != 1 and needs_index_map(x, d)
    }
    found = remap(rec, x, maps, "repeat")
    if found is None:
        return NotImplemented
    others = [1 if d - new in maps else n for d, n in enumerate(times)]
    dims = [(1,)] * new + list(found.space.dims)
    layout = resized(Layout(tuple(dims), found.space.extent), outs[0].shape)
    return local(rec, func, [found, others], {}, outs[0], layout, name="repeat")


def repeat_runs(size: int, times: int) -> tuple[Run, ...]:
    if size == 1:
        return (Run(0, times, 0, 0),)
    return tuple(Run(i * size, (i + 1) * size, 0) for i in range(times))


@ATEN.rule(aten.expand.default, kind="layout", enlarges=True)
def expand(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, shape = args[0], tuple(outs[0].shape)
    new = len(shape) - len(x.shape)
    maps = {
        d: repeat_runs(1, shape[d + new])
        for d in range(len(x.shape))
        if x.shape[d] != shape[d + new] and needs_index_map(x, d)
    }
    found = remap(rec, x, maps, "expand")
    if found is None or any(found.shape[d] != shape[d + new] for d in found.space.axis_dims):
        return NotImplemented
    layout = resized(Layout((*((1,) for _ in range(new)), *found.space.dims), found.space.extent), shape)
    return found if layout == found.space else rec.emit(Expand(layout), [found], outs, layout, "expand")


# Padding --------------------------------------------------------------------------------------------------


def pad_runs(mode: str, size: int, before: int, after: int) -> Runs | None:
    """Return the runs of padding along one axis; None if negative padding crops all of it."""
    start = max(-before, 0)
    kept = size - start + min(after, 0)
    if kept < 1:
        return None
    before_from, after_from, step = {
        "constant": (None, None, 1),
        "reflect": (before, size - 2, -1),
        "replicate": (0, size - 1, 0),
        "circular": (start + kept - before, start, 1),  # PyTorch crops first
    }[mode]
    lead, trail = max(before, 0), max(after, 0)
    runs = [
        Run(0, lead, before_from, step),
        Run(lead, lead + kept, start),
        Run(lead + kept, lead + kept + trail, after_from, step),
    ]
    return tuple(run for run in runs if run.hi > run.lo)


def record_pad(rec: Recorder, x: Value, pads: Sequence[int], mode: str, fill: float, out: Tensor, name: str) -> Any:
    """Record padding; ``pads`` is in PyTorch's order, last dimension first."""
    rank = len(x.shape)
    pairs = {rank - 1 - i: (pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2)}
    pairs = {d: pair for d, pair in pairs.items() if any(pair)}
    maps = {d: pad_runs(mode, x.shape[d], *pair) for d, pair in pairs.items() if needs_index_map(x, d)}
    others = {d: pair for d, pair in pairs.items() if d not in maps}
    if out.dtype != x.dtype or (others and mode != "constant") or any(runs is None for runs in maps.values()):
        return NotImplemented
    found = remap(rec, x, {d: runs for d, runs in maps.items() if runs is not None}, name, fill)
    if found is None or not others:
        return NotImplemented if found is None else found
    flat = [n for d in reversed(range(rank)) for n in others.get(d, (0, 0))]
    return local(
        rec, aten.constant_pad_nd.default, [found, flat, fill], {}, out, resized(found.space, out.shape), name=name
    )


@ATEN.rule(aten.constant_pad_nd.default, kind="layout")
def constant_pad(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, pads, fill = arguments(func, args, kwargs).values()
    return record_pad(rec, x, pads, "constant", fill, outs[0], "constant_pad")


@over_last_dims(
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default,
    kind="layout",
)  # fmt: skip
def mirrored_pad(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    mode = "reflect" if operator_name(func).startswith("reflection") else "replicate"
    return record_pad(rec, args[0], args[1], mode, 0.0, outs[0], f"{mode}_pad")


@API.rule(F.pad, kind="layout")
def circular_pad(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """PyTorch's operators for it, copies into an empty tensor, cannot be tiled one by one."""
    a = arguments(func, args, kwargs)
    if a["mode"] != "circular" or not a["input"].is_map:
        return NotImplemented
    return record_pad(rec, a["input"], a["pad"], "circular", 0.0, outs[0], "circular_pad")
