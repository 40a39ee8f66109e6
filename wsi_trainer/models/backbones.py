"""Backbones: from a slide to a map of features. Plain convolutional networks that know nothing of tiles.

Each has `out_channels` and `stride` (pixels of the slide for one position of the map), which is all a head
and a heat map need to know. Any other `nn.Module` with these two attributes may be named in a config by its
import path.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from wsi_trainer.models.blocks import NormKind, StandardisedConv2d, conv3x3, conv_norm_relu, make_norm


class Backbone(nn.Module):
    """A map from (N, 3, H, W) to (N, out_channels, H / stride, W / stride)."""

    out_channels: int
    stride: int


class VGG(Backbone):
    """Stages of 3×3 convolutions, each stage ended by a 2×2 maximum."""

    def __init__(
        self,
        widths: Sequence[int] = (16, 32, 64, 128),
        convs: int = 2,
        stem_stride: int = 1,
        norm: NormKind = "weight",
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage.
            convs: Convolutions in each stage.
            stem_stride: Stride of the first convolution; 2 makes everything after it four times cheaper.
            norm: Normalisation after each convolution.
        """
        super().__init__()
        widths = _checked(widths)
        layers: list[nn.Module] = []
        inputs = 3
        for stage, width in enumerate(widths):
            for index in range(convs):
                stride = stem_stride if stage == index == 0 else 1
                layers.append(conv_norm_relu(inputs, width, norm, stride))
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** len(widths)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: NormKind) -> None:
        super().__init__()
        self.first = conv_norm_relu(inputs, outputs, norm, stride)
        self.second = nn.Sequential(conv3x3(outputs, outputs, norm), make_norm(norm, outputs))
        last = self.second[0]
        # Without a norm the sum grows from block to block: start each block as its shortcut.
        if isinstance(last, StandardisedConv2d):
            nn.init.zeros_(last.gain)
        elif norm == "none" and isinstance(last, nn.Conv2d):
            nn.init.zeros_(last.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), make_norm(norm, outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.first(x)) + self.shortcut(x))


class ResNet(Backbone):
    """A residual network with a strided 3×3 stem; `widths=(64, 128, 256, 512), blocks=2` has ResNet-18's
    stages.
    """

    def __init__(
        self,
        widths: Sequence[int] = (16, 32, 64, 128),
        blocks: int = 1,
        stem_stride: int = 2,
        norm: NormKind = "batch",
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage; each stage after the first halves the map.
            blocks: Residual blocks in each stage.
            stem_stride: Stride of the first convolution.
            norm: Normalisation after each convolution. With one slide a step, "batch" normalises by that
                slide.
        """
        super().__init__()
        widths = _checked(widths)
        layers: list[nn.Module] = [conv_norm_relu(3, widths[0], norm, stem_stride)]
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(ResidualBlock(inputs, width, stride, norm))
                inputs = width
        self.layers = nn.Sequential(*layers)
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** (len(widths) - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ConvNeXtBlock(nn.Module):
    """A depthwise 7×7 convolution and a two-layer perceptron at each position, with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            make_norm("channel", channels),
            nn.Conv2d(channels, 4 * channels, 1),
            nn.GELU(),
            nn.Conv2d(4 * channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ConvNeXt(Backbone):
    """A patch stem, then stages of ConvNeXt blocks with a 2×2 strided convolution between stages."""

    def __init__(
        self, widths: Sequence[int] = (24, 48, 96), depths: Sequence[int] = (1, 1, 2), stem_stride: int = 4
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage.
            depths: Blocks in each stage, one number for each width.
            stem_stride: Side of the patches of the stem.
        """
        super().__init__()
        widths = _checked(widths)
        if len(depths) != len(widths):
            raise ValueError(f"ConvNeXt has {len(widths)} widths but {len(depths)} depths; give one depth for each")
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], stem_stride, stride=stem_stride)]
        layers.append(make_norm("channel", widths[0]))
        layers.extend(ConvNeXtBlock(widths[0]) for _ in range(depths[0]))
        for (inputs, outputs), depth in zip(pairwise(widths), depths[1:], strict=True):
            layers += [make_norm("channel", inputs), nn.Conv2d(inputs, outputs, 2, stride=2)]
            layers.extend(ConvNeXtBlock(outputs) for _ in range(depth))
        self.layers = nn.Sequential(*layers)
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** (len(widths) - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _checked(widths: Sequence[int]) -> list[int]:
    if not widths or any(width < 1 for width in widths):
        raise ValueError(f"widths is {list(widths)}; give at least one positive number of channels")
    return list(widths)
