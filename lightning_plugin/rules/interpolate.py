"""Interpolation to any size, in every mode of `torch.nn.functional.interpolate`.

At a rational scale with small terms (2, 1/2, 3/2), the positions of outputs among inputs repeat with a short period:
PyTorch's own kernel runs on the input tile, which begins where a period does. At other scales each axis is a weighted
sum of its taps (`sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.ops import SeparableOp
from lightning_plugin.private import operator_name
from lightning_plugin.rules.channels import over_last_dims
from lightning_plugin.rules.reductions import widen
from lightning_plugin.rules.sampling import (
    Antialiased,
    Cubic,
    Linear,
    Nearest,
    Rounding,
    Sampler,
    Scaled,
    mix,
)
from lightning_plugin.rules.table import Recorder
from lightning_plugin.rules.window import axes_of_last, with_window_sizes

aten = torch.ops.aten

#: Longest period, in input or output positions, for which PyTorch's kernel is used.
PERIOD = 8


@dataclass(frozen=True)
class Resample(SeparableOp):
    """Weighted sum of taps along each axis in turn.

    Attributes:
        maps: Sampler of each axis.
        dims: Dimension of each axis.
    """

    kind: ClassVar[str] = "resample"
    uniform: ClassVar[bool] = True
    maps: tuple[Sampler, ...]
    dims: tuple[int, ...]

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = widen(tiles[0])
        (held,) = self.need(box)
        for sampler, a, d in zip(self.maps, self.axes, self.dims, strict=True):
            index, weight = sampler.taps(box.lo[a], box.hi[a])
            x = mix(x, d, index - held.lo[a], weight)
        return x.to(tiles[0].dtype)


@dataclass(frozen=True, slots=True)
class Period:
    """Sampler whose weights repeat; the interval that it needs begins with a period.

    Attributes:
        sampler: The sampler.
        inputs: Inputs in a period.
        outputs: Outputs in a period.
    """

    sampler: Sampler
    inputs: int
    outputs: int

    def start(self, lo: int, hi: int) -> int:
        """Return the number of periods before the inputs of outputs ``[lo, hi)``."""
        return min(self.sampler.need(lo, hi)[0] // self.inputs, lo // self.outputs)

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        return self.start(lo, hi) * self.inputs, self.sampler.need(lo, hi)[1]

    def mark(self, lo: int, hi: int) -> int:
        """Offset of the outputs in their first period."""
        return lo - self.start(lo, hi) * self.outputs


@dataclass(frozen=True)
class Periodic(SeparableOp):
    """PyTorch's kernel on a tile, for samplers with a period.

    Attributes:
        maps: Period of each axis.
        dims: Dimension of each axis.
        func: PyTorch's operator.
        flags: Its arguments between sizes and scales.
    """

    kind: ClassVar[str] = "resample"
    uniform: ClassVar[bool] = True
    maps: tuple[Period, ...]
    dims: tuple[int, ...]
    func: Any
    flags: tuple[Any, ...]

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        sizes = []
        for m, (lo, hi), d in zip(self.maps, self.intervals(box), self.dims, strict=True):
            size = hi - lo + m.mark(lo, hi)
            # PyTorch has shortcuts for certain sizes, which the size of a tile must not meet by chance: equal sizes
            # are copied, and for twice the size the nearest neighbour is the half.
            if isinstance(m.sampler, Nearest):
                size = x.shape[d] * m.outputs
            elif size == x.shape[d]:
                size += 1
            sizes.append(size)
        x = self.func(x, sizes, *self.flags, *(m.outputs / m.inputs for m in self.maps))
        for m, (lo, hi), d in zip(self.maps, self.intervals(box), self.dims, strict=True):
            x = x.narrow(d, m.mark(lo, hi), hi - lo)
        return x


def period_of(sampler: Sampler) -> Period | None:
    """Return the period of a sampler; None if it is long or not exact."""
    if isinstance(sampler, Nearest):
        return None if sampler.repeats is None else Period(sampler, 1, sampler.repeats)
    if not isinstance(sampler, (Linear, Cubic)) or sampler.align or sampler.size == sampler.out:
        return None
    ratio = Fraction(sampler.scale).limit_denominator(PERIOD)
    if ratio.numerator in range(1, PERIOD + 1) and float(ratio) == sampler.scale:
        return Period(sampler, ratio.numerator, ratio.denominator)
    return None


def record_resample(
    rec: Recorder, x: Value, samplers: Sequence[Sampler], out: Tensor, func: Any, flags: tuple[Any, ...]
) -> Any:
    """Record a resampling of the last dimensions, those without an axis from one position to one."""
    count = len(samplers)
    found = axes_of_last(x, count)
    if found is None:
        return NotImplemented
    axes, used = found
    if any(out.shape[len(x.shape) - count + i] != 1 for i in range(count) if i not in used):
        return NotImplemented
    chosen = tuple(samplers[i] for i in used)
    dims = tuple(len(x.shape) - count + i for i in used)
    periods = tuple(p for p in map(period_of, chosen) if p is not None)
    if len(periods) == count:
        op: SeparableOp = Periodic(periods, axes, dims, func, flags)
    else:
        op = Resample(chosen, axes, dims)
    layout = with_window_sizes(x, axes, out.shape)
    return rec.emit(op, [x], [out], layout, operator_name(func))[0]


def scale_factors(args: Sequence[Any], first: int, count: int) -> list[float | None]:
    """Return the scales of a call, one for each dimension; None for one that was not given."""
    given = list(args[first : first + count])
    return given + [None] * (count - len(given))


@over_last_dims(
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    kind="resample", enlarges=True,
)  # fmt: skip
def upsample_nearest(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, sizes = args[0], args[1]
    mode = "nearest-exact" if "exact" in operator_name(func) else "nearest"
    given = scale_factors(args, 2, len(sizes))
    if copies_on_cuda(x, sizes, given):
        return NotImplemented
    how = rounding_of(x, sizes)
    samplers = [
        Nearest(size, out, factor, mode, how, str(x.device))
        for size, out, factor in zip(x.shape[-len(sizes) :], sizes, given, strict=True)
    ]
    return record_resample(rec, x, samplers, outs[0], func, ())


def copies_on_cuda(x: Value, sizes: Sequence[int], given: Sequence[float | None]) -> bool:
    """True if, on CUDA, an axis keeps its size although a factor was given.

    Forward, backward or neither copies the axis there, depending on the operator: the call is left to PyTorch.
    """
    axes = zip(given, x.shape[-len(sizes) :], sizes, strict=True)
    return x.device.type == "cuda" and any(f not in (None, 1.0) and size == out for f, size, out in axes)


def rounding_of(x: Value, sizes: Sequence[int]) -> Rounding:
    """Return the arithmetic by which PyTorch finds nearest neighbours in a map."""
    if x.device.type != "cpu":
        return Rounding.SINGLE
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    last = len(sizes) in formats and x.shape[1] > 3 and x.fake.is_contiguous(memory_format=formats[len(sizes)])
    if last or (len(sizes) == 2 and sum(sizes) <= 128):
        return Rounding.DIRECT
    return Rounding.DOUBLE if x.dtype == torch.float64 else Rounding.SINGLE


@over_last_dims(
    aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.default, aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default,
    kind="resample", enlarges=True,
)  # fmt: skip
def upsample(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, sizes, align = args[:3]
    given = scale_factors(args, 3, len(sizes))
    if not x.dtype.is_floating_point or copies_on_cuda(x, sizes, given):
        return NotImplemented
    name = operator_name(func)
    if "cubic" in name and tuple(outs[0].shape) == x.shape and any(f not in (None, 1.0) for f in given):
        return NotImplemented  # PyTorch's backward copies, whatever the factor: left to PyTorch
    samplers: list[Scaled] = []
    for size, out, factor in zip(x.shape[-len(sizes) :], sizes, given, strict=True):
        if name.endswith("_aa"):
            samplers.append(Antialiased(size, out, factor, align, 2 if "cubic" in name else 1))
        else:
            samplers.append((Cubic if "cubic" in name else Linear)(size, out, factor, align))
    return record_resample(rec, x, samplers, outs[0], func, (align,))
