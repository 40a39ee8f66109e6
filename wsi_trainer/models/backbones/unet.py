"""U-Nets: the encoder alone, for the label of a slide, and the whole, for a class of each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.backbones.base import Backbone, check_widths
from wsi_trainer.models.backbones.pyramid import PyramidBackbone
from wsi_trainer.models.blocks import NormKind, conv_norm_relu

WIDTHS = (16, 32, 64, 128)


class UNetEncoder(Backbone):
    """Two 3×3 convolutions in each stage, a 2×2 maximum between stages, down to the U-Net's bottleneck.

    Its layers are in the order of a U-Net's contracting path, so weights of one that was trained to segment can be
    loaded (`model.pretrained`) where their names are those of this module.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, norm: NormKind = "batch") -> None:
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


class UNet(PyramidBackbone):
    """An encoder, and map by map back up: enlarged, beside the encoder's next finer map, two convolutions.

    With its own encoder, a `UNetEncoder`, there is a position for each pixel, for tasks that have a target for each
    (SegmentationTask). The encoder's weights have the names that they have by themselves, within `encoder`.
    """

    def __init__(
        self, widths: Sequence[int] | None = None, norm: NormKind = "weight", encoder: nn.Module | str | None = None
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage of the own encoder, of which the last is the bottleneck; by default
                [16, 32, 64, 128]. With another encoder the channels are those of its maps.
            norm: Normalisation after each convolution of the decoder and of the own encoder. A statistic over the slide
                (batch) is one more pass over all tiles each time, so weight is much faster.
            encoder: Another encoder: a class of this package such as ResNet, or timm:NAME.
        """
        if encoder is not None and widths is not None:
            raise ValueError("UNet: widths are those of its own encoder; give them to the encoder that is named")
        super().__init__(encoder or UNetEncoder(WIDTHS if widths is None else widths, norm))
        self.decoder = nn.ModuleList(
            nn.Sequential(conv_norm_relu(below + width, width, norm), conv_norm_relu(width, width, norm))
            for width, below in reversed(list(pairwise(self.widths)))
        )
        self.out_channels = self.widths[0]

    def decode(self, maps: Sequence[Tensor]) -> Tensor:
        *skips, x = maps
        for block, ratio in zip(self.decoder, reversed(self.ratios()), strict=True):
            x = block(torch.cat([skips.pop(), functional.interpolate(x, scale_factor=ratio)], dim=1))
        return x


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """The map in the height and width of another: what is missing at the end repeats the last, what is over goes."""
    height, width = like.shape[2:]
    x = x[:, :, :height, :width]
    missing = (0, width - x.shape[3], 0, height - x.shape[2])
    return functional.pad(x, missing, mode="replicate") if any(missing) else x
