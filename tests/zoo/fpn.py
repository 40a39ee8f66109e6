"""Feature pyramid network on ResNet, with a segmentation head or with the pyramid itself as the output.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .resnet import ResNet, resnet18, resnet50
from .widths import scaled


class FPN(nn.Module):
    """Lateral 1x1 convolutions and a top-down path, at strides 4 to 32, and a bare subsampling at 64."""

    def __init__(self, backbone: ResNet, channels: int) -> None:
        super().__init__()
        # The classifier's layers would never get a gradient.
        del backbone.avgpool, backbone.fc
        self.backbone = backbone
        self.lateral = nn.ModuleList(nn.Conv2d(c, channels, 1) for c in backbone.stage_channels)
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in backbone.stage_channels)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        laterals = [conv(c) for conv, c in zip(self.lateral, self.backbone.forward_stages(x), strict=True)]
        top = laterals[-1]
        levels = [top]
        for lateral in laterals[-2::-1]:
            top = lateral + F.interpolate(top, size=lateral.shape[-2:], mode="nearest")
            levels.insert(0, top)
        out = OrderedDict((f"p{i + 2}", conv(y)) for i, (conv, y) in enumerate(zip(self.smooth, levels, strict=True)))
        out["p6"] = F.max_pool2d(out["p5"], kernel_size=1, stride=2, padding=0)
        return out


class SegmentationFPN(nn.Module):
    """Each level is convolved and doubled up to stride 4; their sum is resized to the image."""

    def __init__(self, pyramid: FPN, channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.pyramid = pyramid
        self.blocks = nn.ModuleList()
        for level in range(4):
            convs = nn.ModuleList()
            for _ in range(max(1, level)):
                convs.append(
                    nn.Sequential(
                        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                        nn.GroupNorm(2, channels),
                        nn.ReLU(inplace=True),
                    )
                )
            self.blocks.append(convs)
        self.dropout = nn.Dropout2d(dropout, inplace=True)
        self.head = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = list(self.pyramid(x).values())[:4]
        total = 0
        for level, (convs, y) in enumerate(zip(self.blocks, levels, strict=True)):
            assert isinstance(convs, nn.ModuleList)
            for conv in convs:
                y = conv(y)
                if level > 0:
                    y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
            # Doubling overshoots an odd size by up to the level's stride.
            total = total + y[:, :, : levels[0].size(2), : levels[0].size(3)]
        logits = self.head(self.dropout(total))
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


def fpn(*, in_channels: int = 3, width_mult: float = 1.0, depth: int = 50) -> FPN:
    backbone = (resnet50 if depth == 50 else resnet18)(in_channels=in_channels, width_mult=width_mult)
    return FPN(backbone, scaled(256, width_mult, divisor=2))


def segmentation_fpn(
    *,
    in_channels: int = 3,
    num_classes: int = 2,
    width_mult: float = 1.0,
    depth: int = 50,
    dropout: float = 0.2,
) -> SegmentationFPN:
    pyramid = fpn(in_channels=in_channels, width_mult=width_mult, depth=depth)
    return SegmentationFPN(pyramid, scaled(256, width_mult, divisor=2), num_classes, dropout)


_tiny = partial(segmentation_fpn, width_mult=1 / 16, depth=18)

ENTRIES = (
    ZooEntry("fpn", partial(_tiny, dropout=0.0), (2, 3, 79, 67), True, segmentation_fpn),
    ZooEntry("fpn_dropout", partial(_tiny, dropout=0.2), (2, 3, 61, 73), True, segmentation_fpn, stochastic=True),
)

STRUCTURED = (ZooEntry("fpn_pyramid", partial(fpn, width_mult=1 / 16), (2, 3, 83, 71), True, fpn),)
