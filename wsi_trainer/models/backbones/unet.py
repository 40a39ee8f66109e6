"""The encoder of a U-Net."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wsi_trainer.models.backbones.base import Backbone, check_widths
from wsi_trainer.models.blocks import NormKind, conv_norm_relu


class UNetEncoder(Backbone):
    """Two 3×3 convolutions in each stage, a 2×2 maximum between stages, down to the U-Net's bottleneck.

    Its layers are in the order of a U-Net's contracting path, so weights of one that was trained to segment can be
    loaded (`model.pretrained`) where their names are those of this module.
    """

    def __init__(self, widths: Sequence[int] = (16, 32, 64, 128), norm: NormKind = "batch") -> None:
        """Build the network.

        Args:
            widths: Channels of each stage; the last is the bottleneck.
            norm: Normalisation after each convolution.
        """
        super().__init__()
        widths = check_widths(widths)
        layers: list[nn.Module] = []
        inputs = 3
        for stage, width in enumerate(widths):
            if stage:
                layers.append(nn.MaxPool2d(2))
            layers += [conv_norm_relu(inputs, width, norm), conv_norm_relu(width, width, norm)]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.lengths = [2] + [3] * (len(widths) - 1)
        self.out_channels = widths[-1]
        self.stride = 2 ** (len(widths) - 1)
