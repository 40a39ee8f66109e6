"""DarkNet: residual blocks that squeeze and widen the channels, with leaky ReLUs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from wsi_trainer.models.backbones.base import Backbone, check_widths
from wsi_trainer.models.blocks import NormKind, make_conv, make_norm


def conv_norm_leaky(inputs: int, outputs: int, norm: NormKind, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """A padded convolution, its normalisation and a leaky ReLU."""
    conv = make_conv(inputs, outputs, norm, kernel, stride)
    return nn.Sequential(conv, make_norm(norm, outputs), nn.LeakyReLU(0.1, inplace=True))


class DarkBlock(nn.Module):
    """A 1×1 convolution to half the channels, a 3×3 one back, and a shortcut."""

    def __init__(self, channels: int, norm: NormKind) -> None:
        super().__init__()
        half = max(channels // 2, 1)
        self.layers = nn.Sequential(
            conv_norm_leaky(channels, half, norm, kernel=1), conv_norm_leaky(half, channels, norm)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class DarkNet(Backbone):
    """A 3×3 stem, then stages of a strided convolution and residual blocks; `blocks=(1, 2, 8, 8, 4)` with
    `widths=(64, 128, 256, 512, 1024)` has DarkNet-53's stages.
    """

    def __init__(
        self,
        widths: Sequence[int] = (32, 64, 128, 256),
        blocks: Sequence[int] = (1, 2, 2, 1),
        stem_stride: int = 1,
        norm: NormKind = "batch",
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage; each stage halves the map.
            blocks: Residual blocks of each stage, one number for each width.
            stem_stride: Stride of the first convolution.
            norm: Normalisation after each convolution.
        """
        super().__init__()
        widths = check_widths(widths)
        if len(blocks) != len(widths):
            raise ValueError(f"DarkNet has {len(widths)} widths but {len(blocks)} blocks; give one number for each")
        inputs = max(widths[0] // 2, 1)
        layers: list[nn.Module] = [conv_norm_leaky(3, inputs, norm, stride=stem_stride)]
        for width, count in zip(widths, blocks):
            layers.append(conv_norm_leaky(inputs, width, norm, stride=2))
            layers.extend(DarkBlock(width, norm) for _ in range(count))
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.lengths = [blocks[0] + 2, *(count + 1 for count in blocks[1:])]
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** len(widths)
