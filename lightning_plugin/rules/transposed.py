"""Transposed convolutions.

Input ``i`` adds to outputs ``i * stride - padding + dilation * [0, kernel)``. A tile takes all inputs that add to its
outputs, runs PyTorch's operator on them without padding, and cuts its outputs out; where nothing adds to an output
(output padding, a stride longer than the kernel), it is the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.ops import Along, Kernel
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.unread import How, unread
from lightning_plugin.rules.window import axes_of, each, windowed

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Stamp:
    """One axis: an input at ``i`` is stamped on outputs ``i * stride - before + dilation * [0, kernel)``."""

    kernel: int
    stride: int
    dilation: int
    before: int
    size: int

    @property
    def length(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        """The inputs that add to outputs ``[lo, hi)``; one position, whose outputs are cut off, if there are none."""
        first = max(0, -((self.length - 1 - lo - self.before) // self.stride))
        end = min(self.size, (hi - 1 + self.before) // self.stride + 1)
        if end <= first:
            first = min(max(0, end - 1), self.size - 1)
            end = first + 1
        return first, end

    def mark(self, lo: int, hi: int) -> tuple[int, int, int, int]:
        """(where outputs start in what the inputs of ``[lo, hi)`` are stamped on, how many, zeros before, after)."""
        first, end = self.need(lo, hi)
        start = first * self.stride - self.before
        stop = (end - 1) * self.stride - self.before + self.length
        inside_lo = min(max(lo, start), stop)
        inside_hi = max(min(hi, stop), inside_lo)
        if inside_hi == inside_lo:
            return 0, 0, hi - lo, 0
        return inside_lo - start, inside_hi - inside_lo, inside_lo - lo, hi - inside_hi


@dataclass(frozen=True)
class Transposed(Along):
    kind: ClassVar[str] = "resample"
    maps: tuple[Stamp, ...]
    groups: int
    bias: bool

    def cuts(self, box: Box) -> list[tuple[int, int, int, int]]:
        """Offset and padding of the outputs in the inputs' stamps, on each axis."""
        return [stamp.mark(lo, hi) for stamp, (lo, hi) in zip(self.maps, self.intervals(box), strict=True)]

    @property
    def how(self) -> How:
        """Arguments of the operator on all inputs."""
        strides, dilations = tuple(s.stride for s in self.maps), tuple(s.dilation for s in self.maps)
        return How(strides, (0,) * len(strides), dilations, True, self.groups)

    def unread(self, box: Box) -> Kernel | None:
        cuts = self.cuts(box)
        if any(n for cut in cuts for n in cut[2:]):
            return None  # padding would make a result

        def kernel(tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
            return narrowed(unread(tiles[0], vectors[0], vectors[1] if self.bias else None, self.how), cuts)

        return kernel

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        count, how = len(self.maps), self.how
        cuts = self.cuts(box)
        pads = [n for cut in reversed(cuts) for n in cut[2:]]
        bias = vectors[1] if self.bias else None
        x = aten.convolution.default(
            tiles[0], vectors[0], None if any(pads) else bias, how.stride, how.padding, how.dilation, True,
            [0] * count, self.groups,
        )  # fmt: skip
        x = narrowed(x, cuts)
        if any(pads):
            x = F.pad(x, pads)
            x = x if bias is None else x + bias.view(-1, *[1] * count)
        return x


def narrowed(stamped: Tensor, cuts: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Cut the outputs out of the inputs' stamps."""
    for d, (start, size, _, _) in enumerate(cuts, stamped.dim() - len(cuts)):
        stamped = stamped.narrow(d, start, size)
    return stamped


@ATEN.rule(aten.convolution.default)
def transposed(rec: Recorder, func: Any, args: Sequence[Any], kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, weight, bias, stride, padding, dilation, turned, _, groups = args
    count = len(weight.shape) - 2
    axes = axes_of(x, count) if x.is_map and turned else None
    if axes is None or weight.is_map or (bias is not None and bias.is_map) or len(x.shape) != count + 2:
        return NotImplemented
    if x.space.tidy.is_space(1):
        return NotImplemented
    stamps = tuple(
        Stamp(k, s, d, p, x.space.extent[a])
        for k, s, d, p, a in zip(
            weight.shape[2:], each(stride, count), each(dilation, count), each(padding, count), axes, strict=True
        )
    )
    inputs = [x, weight] if bias is None else [x, weight, bias]
    op = Transposed(stamps, axes, groups, bias is not None)
    return rec.emit(op, inputs, outs, windowed(x, count, outs[0].shape), "conv_transpose")
