"""Residual networks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from wsi_trainer.models.backbones.base import Backbone, check_widths
from wsi_trainer.models.blocks import NormKind, StandardisedConv2d, conv3x3, conv_norm_relu, make_norm


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
        widths = check_widths(widths)
        layers: list[nn.Module] = [conv_norm_relu(3, widths[0], norm, stem_stride)]
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(ResidualBlock(inputs, width, stride, norm))
                inputs = width
        self.layers = nn.Sequential(*layers)
        self.lengths = [blocks + 1] + [blocks] * (len(widths) - 1)
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** (len(widths) - 1)
