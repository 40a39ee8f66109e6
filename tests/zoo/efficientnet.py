"""EfficientNet-B0: SiLU, squeeze-and-excite, stochastic depth; also with TensorFlow's "same" padding.

That padding is asymmetric and follows from the size of the map at each convolution.
Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import make_divisible

# expansion, kernel, stride, channels, repeats
_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class Conv2dSame(nn.Conv2d):
    """Pads so that the output has ``ceil(size / stride)`` positions, the odd one after."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for axis in (1, 0):
            size, kernel, stride = x.shape[2 + axis], self.kernel_size[axis], self.stride[axis]
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        if any(pads):
            x = F.pad(x, pads)
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int, groups: int, same: bool) -> nn.Conv2d:
    if same:
        return Conv2dSame(in_channels, out_channels, kernel, stride, groups=groups, bias=False)
    return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)


class ConvBNSiLU(nn.Sequential):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        same: bool = False,
    ) -> None:
        super().__init__(
            _conv(in_channels, out_channels, kernel, stride, groups, same),
            nn.BatchNorm2d(out_channels),
            nn.SiLU(inplace=True),
        )


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = x.mean((2, 3), keepdim=True)
        s = self.reduce(s)
        s = s * s.sigmoid()
        return x * self.expand(s).sigmoid()


class MBConv(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        expansion: int,
        kernel: int,
        stride: int,
        drop: float,
        same: bool,
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand = ConvBNSiLU(in_channels, hidden, 1) if expansion != 1 else nn.Identity()
        self.depthwise = ConvBNSiLU(hidden, hidden, kernel, stride, groups=hidden, same=same)
        self.se = SqueezeExcite(hidden, max(1, in_channels // 4))
        self.project = nn.Conv2d(hidden, out_channels, 1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.residual = stride == 1 and in_channels == out_channels
        self.drop = drop

    def _stochastic_depth(self, x: Tensor) -> Tensor:
        if not self.training or self.drop == 0.0:
            return x
        noise = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
        noise = noise.bernoulli_(1.0 - self.drop).div_(1.0 - self.drop)
        return x * noise

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.project(self.se(self.depthwise(self.expand(x)))))
        if self.residual:
            out = self._stochastic_depth(out)
            out += x
        return out


class EfficientNet(nn.Module):
    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        divisor: int = 8,
        drop_path: float = 0.0,
        dropout: float = 0.2,
        same: bool = False,
    ) -> None:
        super().__init__()
        channels = make_divisible(32 * width_mult, divisor)
        self.stem = ConvBNSiLU(in_channels, channels, 3, stride=2, same=same)
        total = sum(repeats for *_, repeats in _STAGES)
        self.stages = nn.ModuleList()
        done = 0
        for expansion, kernel, stride, width, repeats in _STAGES:
            width = make_divisible(width * width_mult, divisor)
            stage = nn.Sequential()
            for i in range(repeats):
                drop = drop_path * done / total
                stage.append(MBConv(channels, width, expansion, kernel, stride if i == 0 else 1, drop, same))
                channels, done = width, done + 1
            self.stages.append(stage)
        self.head = ConvBNSiLU(channels, 4 * channels, 1)
        self.dropout = dropout
        self.classifier = nn.Linear(4 * channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        x = F.adaptive_avg_pool2d(self.head(x), 1).flatten(1)
        if self.dropout > 0.0:
            x = F.dropout(x, self.dropout, self.training)
        return self.classifier(x)


_tiny = partial(EfficientNet, num_classes=4, width_mult=1 / 8, divisor=2, dropout=0.0)

ENTRIES = (
    ZooEntry("efficientnet_b0", _tiny, (2, 3, 109, 83), False, EfficientNet),
    ZooEntry(
        "efficientnet_b0_same",
        partial(_tiny, same=True),
        (2, 3, 91, 118),
        False,
        partial(EfficientNet, same=True),
    ),
    ZooEntry(
        "efficientnet_b0_drop_path",
        partial(_tiny, drop_path=0.3, dropout=0.2),
        (3, 3, 67, 89),
        False,
        partial(EfficientNet, drop_path=0.2),
        stochastic=True,
    ),
)
