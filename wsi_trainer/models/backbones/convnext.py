"""ConvNeXt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from wsi_trainer.models.backbones.base import Backbone, check_widths
from wsi_trainer.models.blocks import make_norm


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
        widths = check_widths(widths)
        if len(depths) != len(widths):
            raise ValueError(f"ConvNeXt has {len(widths)} widths but {len(depths)} depths; give one depth for each")
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], stem_stride, stride=stem_stride)]
        layers.append(make_norm("channel", widths[0]))
        layers.extend(ConvNeXtBlock(widths[0]) for _ in range(depths[0]))
        for (inputs, outputs), depth in zip(pairwise(widths), depths[1:], strict=True):
            layers += [make_norm("channel", inputs), nn.Conv2d(inputs, outputs, 2, stride=2)]
            layers.extend(ConvNeXtBlock(outputs) for _ in range(depth))
        self.layers = nn.Sequential(*layers)
        self.lengths = [depth + 2 for depth in depths]
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** (len(widths) - 1)
