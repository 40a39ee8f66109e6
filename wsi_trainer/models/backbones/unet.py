"""U-Nets: the encoder alone, for the label of a slide, and the whole, for a class of each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

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


class UNet(Backbone):
    """A `UNetEncoder`, and stage by stage back up: twice as large, beside the encoder's map of that size, two
    convolutions.

    The slide is continued at its end, by repeating the last row and column, until its sides can be halved that often.
    Its map has a position for each pixel, for tasks that have a target for each (SegmentationTask). The encoder's
    weights have the names of `UNetEncoder` within `encoder`.
    """

    stride = 1

    def __init__(self, widths: Sequence[int] = (16, 32, 64, 128), norm: NormKind = "weight") -> None:
        """Build the network.

        Args:
            widths: Channels of each stage of the encoder; the last is the bottleneck.
            norm: Normalisation after each convolution. A statistic over the slide (batch) is one more pass over
                all tiles each time, so weight is much faster.
        """
        super().__init__()
        widths = check_widths(widths)
        self.encoder = UNetEncoder(widths, norm)
        self.decoder = nn.ModuleList(
            nn.Sequential(conv_norm_relu(below + width, width, norm), conv_norm_relu(width, width, norm))
            for width, below in reversed(list(pairwise(widths)))
        )
        self.out_channels = widths[0]
        self.coarsest = self.encoder.stride

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        x = functional.pad(x, (0, -width % self.coarsest, 0, -height % self.coarsest), mode="replicate")
        skips = []
        for stage in self.encoder.stages():
            assert isinstance(stage, nn.ModuleList)
            for layer in stage:
                x = layer(x)
            skips.append(x)
        skips.pop()
        for block in self.decoder:
            skip = skips.pop()
            x = block(torch.cat([skip, functional.interpolate(x, scale_factor=2.0)], dim=1))
        return x[:, :, :height, :width]

    def stages(self) -> list[nn.Module]:
        return [*self.encoder.stages(), *self.decoder]


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """The map in the height and width of another: what is missing at the end repeats the last, what is over goes."""
    height, width = like.shape[2:]
    x = x[:, :, :height, :width]
    missing = (0, width - x.shape[3], 0, height - x.shape[2])
    return functional.pad(x, missing, mode="replicate") if any(missing) else x
