"""VGG: stages of 3×3 convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wsi_trainer.models.backbones.base import Backbone, check_widths
from wsi_trainer.models.blocks import NormKind, conv_norm_relu


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
        widths = check_widths(widths)
        layers: list[nn.Module] = []
        inputs = 3
        for stage, width in enumerate(widths):
            for index in range(convs):
                stride = stem_stride if stage == index == 0 else 1
                layers.append(conv_norm_relu(inputs, width, norm, stride))
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.lengths = [convs + 1] * len(widths)
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** len(widths)
