"""An EfficientNet-like network: inverted bottlenecks with squeeze-and-excite."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from wsi_trainer.models.backbones.base import Backbone, check_widths
from wsi_trainer.models.blocks import NormKind, make_conv, make_norm


class SqueezeExcite(nn.Module):
    """Scale each channel by what the mean of all channels over the slide says."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Conv2d(channels, hidden, 1), nn.SiLU(), nn.Conv2d(hidden, channels, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean(dim=(2, 3), keepdim=True))


class InvertedBottleneck(nn.Module):
    """Widen by a 1×1 convolution, look around by a depthwise one, weigh the channels, and narrow again."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int, excite: bool, norm: NormKind) -> None:
        super().__init__()
        inner = expand * inputs
        parts = [make_conv(inputs, inner, norm, 1), make_norm(norm, inner), nn.SiLU()]
        parts += [make_conv(inner, inner, norm, 3, stride, groups=inner), make_norm(norm, inner), nn.SiLU()]
        if excite:
            parts.append(SqueezeExcite(inner, max(inputs // 4, 1)))
        parts += [make_conv(inner, outputs, norm, 1), make_norm(norm, outputs)]
        self.layers = nn.Sequential(*parts)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


class EfficientNet(Backbone):
    """A strided stem, then stages of inverted bottlenecks.

    Squeeze-and-excite needs the mean over the whole slide in every block, which is exact and costs a pass over the
    slide each, unless what comes before it is stored; `excite: false` does without.
    """

    def __init__(
        self,
        widths: Sequence[int] = (16, 24, 40, 80),
        depths: Sequence[int] = (1, 2, 2, 2),
        stem_stride: int = 2,
        expand: int = 4,
        excite: bool = True,
        norm: NormKind = "batch",
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage; each stage after the first halves the map.
            depths: Blocks of each stage, one number for each width.
            stem_stride: Stride of the first convolution.
            expand: How many times wider a block is inside.
            excite: Whether blocks weigh their channels by the mean over the slide.
            norm: Normalisation after each convolution.
        """
        super().__init__()
        widths = check_widths(widths)
        if len(depths) != len(widths):
            raise ValueError(f"EfficientNet has {len(widths)} widths but {len(depths)} depths; give one for each")
        stem = nn.Sequential(make_conv(3, widths[0], norm, 3, stem_stride), make_norm(norm, widths[0]), nn.SiLU())
        layers: list[nn.Module] = [stem]
        inputs = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(InvertedBottleneck(inputs, width, stride, expand, excite, norm))
                inputs = width
        self.layers = nn.Sequential(*layers)
        self.lengths = [depths[0] + 1, *depths[1:]]
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** (len(widths) - 1)
