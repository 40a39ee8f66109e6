"""Layers that networks of this package share: norms, convolutions, and the last layers of heads."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

NormKind = Literal["none", "weight", "batch", "group", "channel"]
"""What keeps activations in range: nothing, standardised weights, or BatchNorm, GroupNorm, LayerNorm over
channels.
"""


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of each position, as ConvNeXt uses.

    It looks at one position only, so it costs a tiled network nothing: no statistic of the whole slide is
    needed.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=1, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(dim=1, keepdim=True)
        scaled = centred * torch.rsqrt(variance + self.eps)
        return scaled * self.weight[None, :, None, None] + self.bias[None, :, None, None]


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose filters are brought to zero mean and a learned length before use.

    A filter of zero mean answers to texture and not to how dark the stain is. It costs nothing in pixels,
    and, unlike BatchNorm, needs no statistic of the slide.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, groups=groups)
        self.gain = nn.Parameter(torch.full((outputs, 1, 1, 1), 3**0.5))  # keeps the variance behind a ReLU

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        centred = self.weight - mean
        length = centred.square().sum(dim=(1, 2, 3), keepdim=True)
        weight = centred * torch.rsqrt(length + 1e-6) * self.gain
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def make_norm(kind: NormKind, channels: int) -> nn.Module:
    """The normalisation layer that `kind` names, for a map of `channels` channels."""
    if kind in ("none", "weight"):
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(_groups(channels), channels)
    if kind == "channel":
        return ChannelNorm(channels)
    raise ValueError(f"norm is {kind!r}; it must be one of none, weight, batch, group, channel")


def _groups(channels: int) -> int:
    """The largest of 8, 4, 2, 1 groups that divides the channels."""
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)


def make_conv(
    inputs: int, outputs: int, norm: NormKind, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A padded convolution for the norm that follows it, initialised for a ReLU."""
    if norm == "weight":
        conv: nn.Conv2d = StandardisedConv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups)
    else:
        bias = norm in ("none", "channel")
        conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def conv3x3(inputs: int, outputs: int, norm: NormKind, stride: int = 1) -> nn.Conv2d:
    """A padded 3×3 convolution for the norm that follows it, initialised for a ReLU."""
    return make_conv(inputs, outputs, norm, 3, stride)


def conv_norm_relu(inputs: int, outputs: int, norm: NormKind, stride: int = 1) -> nn.Sequential:
    """A padded 3×3 convolution, its normalisation and a ReLU."""
    conv = conv3x3(inputs, outputs, norm, stride)
    return nn.Sequential(conv, make_norm(norm, outputs), nn.ReLU(inplace=True))


class RunningStandardise(nn.Module):
    """Subtract the running mean and divide by the running standard deviation, in training as in evaluation.

    Pooled features of two slides differ by a few per cent of their mean, so a linear layer on them first
    has to learn to cancel that mean. BatchNorm would take it away, but with one slide in a batch there is
    no batch to take it from; the statistics of the slides seen so far serve instead. They are constants to
    the gradient.
    """

    def __init__(self, channels: int, momentum: float = 0.02, relative_floor: float = 0.01) -> None:
        """Build the layer.

        Args:
            channels: Entries of the vector.
            momentum: Weight of the newest slide once more than 1 / momentum slides were seen; until then
                all count alike.
            relative_floor: Smallest standard deviation, as a share of the mean: what varies less is not
                blown up.
        """
        super().__init__()
        self.momentum = momentum
        self.relative_floor = relative_floor
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.mean: Tensor
        self.variance: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._update(x.detach())
        floor = (self.relative_floor * self.mean) ** 2
        return (x - self.mean) * torch.rsqrt(self.variance + floor + 1e-8)

    @torch.no_grad()
    def _update(self, x: Tensor) -> None:
        self.seen += 1
        seen = int(self.seen)
        weight = max(self.momentum, 1 / seen)
        newest = x.mean(dim=0).to(self.mean.dtype)
        # In place is safe also with accumulation: backward needs neither of the two, only what was made of them.
        self.mean.lerp_(newest, weight)
        if seen > 1:
            self.variance.lerp_((newest - self.mean) ** 2, weight)


class BranchLinear(nn.Module):
    """Each output is a linear function of its own vector alone, out of `outputs` vectors side by side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(1, tuple(self.weight.shape)) * self.weight).sum(dim=2) + self.bias
