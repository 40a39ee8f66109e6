"""Convolutions and transposed convolutions.

Input ``i`` of a transposed convolution adds to outputs ``i * stride - padding + dilation * [0, kernel)``. A tile takes
all inputs that add to its outputs, runs PyTorch's operator on them without padding, and cuts its outputs out. Outputs
to which no input adds (output padding, a stride longer than the kernel) are the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box, Window
from lightning_plugin.ops import Kernel, SeparableOp
from lightning_plugin.rules.channels import over_last_dims
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import Recorder
from lightning_plugin.rules.unread import ConvolutionArguments, unread, with_bias_gradient
from lightning_plugin.rules.window import SlidingOp, axes_of_all_last, per_dim, window_fields, with_window_sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution(SlidingOp):
    uniform: ClassVar[bool] = True
    groups: int = 1
    bias: bool = True

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(w.stride for w in self.all_windows)

    @property
    def dilation(self) -> tuple[int, ...]:
        return tuple(w.dilation for w in self.all_windows)

    def slide(self, box: Box, x: Tensor, vectors: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
        bias, apart = self.split_bias(vectors)
        x, stride = self.pick_strided(x, vectors[0], padding)
        made = torch.convolution(
            x, vectors[0], bias if apart is None else apart.detach(), stride, padding, self.dilation, False,
            [0] * len(padding), self.groups,
        )  # fmt: skip
        return made if apart is None else with_bias_gradient(made, apart)

    def unread(self, box: Box) -> Kernel:
        return self.kernel(box, self.slide_unread)

    def slide_unread(self, x: Tensor, vectors: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
        bias, apart = self.split_bias(vectors)
        x, stride = self.pick_strided(x, vectors[0], padding)
        made = unread(x, vectors[0], bias, ConvolutionArguments(stride, padding, self.dilation, False, self.groups))
        return made if apart is None else with_bias_gradient(made, apart)

    def pick_strided(self, x: Tensor, weight: Tensor, padding: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Return the input and the stride for the kernel; a strided 1 × 1 convolution picks its positions before.

        On a CPU its gradient, with fewer than 16 channels in channels-last order, writes past its workspace: a crash,
        or wrong numbers (uxlfoundation/oneDNN#6035).
        """
        if not x.is_cpu or weight.shape[1] >= 16 or max(self.stride) == 1 or max(weight.shape[2:]) > 1 or any(padding):
            return x, self.stride
        picked: Any = (..., *(slice(None, None, s) for s in self.stride))
        return x[picked], [1] * len(self.stride)

    def split_bias(self, vectors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias for the kernel and the bias for `with_bias_gradient`, one of which is None."""
        if not self.bias:
            return None, None
        bias = vectors[1]
        apart = torch.is_grad_enabled() and bias.requires_grad and bias.is_cpu and bias.dtype == torch.float32
        return (None, bias) if apart else (bias, None)


@over_last_dims(aten.convolution.default, kind="window")
def convolution(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    count = len(weight.shape) - 2
    if not x.is_map or weight.is_map or len(x.shape) != count + 2 or x.space.normalized.has_axis(1):
        return NotImplemented
    stride, padding, dilation = per_dim(stride, count), per_dim(padding, count), per_dim(dilation, count)
    if transposed:
        return record_transposed(rec, args, stride, padding, dilation, outs)
    found = window_fields(x, tuple(map(Window, weight.shape[2:], stride, dilation, padding)), outs[0].shape, plain=True)
    in_place = all(k == 1 for k in weight.shape[2:]) and set(stride) == {1} and not any(padding)
    if in_place and axes_of_all_last(x, count) is None:
        layout = x.space.with_dim(1, (weight.shape[0],))  # local, whatever axes its dimensions have
        return local(rec, func, args, kwargs, outs[0], layout, name="convolution")
    if found is None:
        return NotImplemented
    fields, layout = found
    inputs = [x, weight] if bias is None else [x, weight, bias]
    op = Convolution(**fields, groups=groups, bias=bias is not None)
    return rec.emit(op, inputs, outs, layout, "convolution")


@dataclass(frozen=True, slots=True)
class Stamp:
    """Index arithmetic of one axis: input ``i`` is stamped on outputs ``i * stride - before + dilation * [0, kernel)``.

    Attributes:
        kernel, stride, dilation: As of the convolution.
        before: Its padding.
        size: Number of inputs.
    """

    kernel: int
    stride: int
    dilation: int
    before: int
    size: int

    @property
    def length(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the inputs that add to outputs ``[lo, hi)``; one input, whose outputs are cut off, if none does."""
        first = max(0, -((self.length - 1 - lo - self.before) // self.stride))
        end = min(self.size, (hi - 1 + self.before) // self.stride + 1)
        if end <= first:
            first = min(max(0, end - 1), self.size - 1)
            end = first + 1
        return first, end

    def mark(self, lo: int, hi: int) -> tuple[int, int, int, int]:
        """Return offset and number of outputs among the stamps of their inputs, and the zeros before and after."""
        first, end = self.need(lo, hi)
        start = first * self.stride - self.before
        stop = (end - 1) * self.stride - self.before + self.length
        inside_lo = min(max(lo, start), stop)
        inside_hi = max(min(hi, stop), inside_lo)
        if inside_hi == inside_lo:
            return 0, 0, hi - lo, 0
        return inside_lo - start, inside_hi - inside_lo, inside_lo - lo, hi - inside_hi


@dataclass(frozen=True)
class Transposed(SeparableOp):
    kind: ClassVar[str] = "resample"
    maps: tuple[Stamp, ...]
    groups: int
    bias: bool

    def cuts(self, box: Box) -> list[tuple[int, int, int, int]]:
        """Return `Stamp.mark` of each axis."""
        return [stamp.mark(lo, hi) for stamp, (lo, hi) in zip(self.maps, self.intervals(box), strict=True)]

    @property
    def arguments(self) -> ConvolutionArguments:
        """Arguments of PyTorch's operator on the inputs of a tile."""
        strides, dilations = tuple(s.stride for s in self.maps), tuple(s.dilation for s in self.maps)
        return ConvolutionArguments(strides, (0,) * len(strides), dilations, True, self.groups)

    def unread(self, box: Box) -> Kernel | None:
        cuts = self.cuts(box)
        if any(n for cut in cuts for n in cut[2:]):
            return None  # padding would compute a result

        def kernel(tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
            return cut_outputs(unread(tiles[0], vectors[0], vectors[1] if self.bias else None, self.arguments), cuts)

        return kernel

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        count, how = len(self.maps), self.arguments
        cuts = self.cuts(box)
        pads = [n for cut in reversed(cuts) for n in cut[2:]]
        bias = vectors[1] if self.bias else None
        x = aten.convolution.default(
            tiles[0], vectors[0], None if any(pads) else bias, how.stride, how.padding, how.dilation, True,
            [0] * count, self.groups,
        )  # fmt: skip
        x = cut_outputs(x, cuts)
        if any(pads):
            x = F.pad(x, pads)
            x = x if bias is None else x + bias.view(-1, *[1] * count)
        return x


def cut_outputs(stamped: Tensor, cuts: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Cut the outputs of a tile out of the stamps of its inputs."""
    for d, (start, size, _, _) in enumerate(cuts, stamped.dim() - len(cuts)):
        stamped = stamped.narrow(d, start, size)
    return stamped


def record_transposed(
    rec: Recorder, args: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    outs: Sequence[Tensor],
) -> Any:  # fmt: skip
    """Record a transposed convolution along axes."""
    x, weight, bias, *_, groups = args
    axes = axes_of_all_last(x, len(stride))
    if axes is None or (bias is not None and bias.is_map):
        return NotImplemented
    sizes = [x.space.extent[a] for a in axes]
    stamps = tuple(map(Stamp, weight.shape[2:], stride, dilation, padding, sizes))
    inputs = [x, weight] if bias is None else [x, weight, bias]
    op = Transposed(stamps, axes, groups, bias is not None)
    return rec.emit(op, inputs, outs, with_window_sizes(x, axes, outs[0].shape), "conv_transpose")
