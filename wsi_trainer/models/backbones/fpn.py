"""Feature pyramid networks: every map of an encoder hears of the coarser ones, and all are added up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.backbones.pyramid import PyramidBackbone
from wsi_trainer.models.backbones.resnet import ResNet
from wsi_trainer.models.blocks import NormKind, conv_norm_relu


class FPN(PyramidBackbone):
    """An encoder, and of each of its maps one with the same number of channels, to which the coarser ones are added.

    Each then goes through a convolution, is enlarged to the finest one's size, and all are added up. Where a U-Net
    works at every size with that size's channels, most of this happens on coarse maps, so it is cheap; borders are as
    fine as the encoder's finest map.
    """

    def __init__(self, width: int = 64, norm: NormKind = "weight", encoder: nn.Module | str | None = None) -> None:
        """Build the network.

        Args:
            width: Channels of the decoder.
            norm: Normalisation after each convolution of the decoder and of the own encoder.
            encoder: A class of this package such as ConvNeXt, or timm:NAME; a small ResNet by default.
        """
        if width < 1:
            raise ValueError(f"FPN: width is {width}; it must be 1 or more")
        super().__init__(encoder or ResNet(norm=norm))
        self.decoder = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(channels, width, 1), conv_norm_relu(width, width, norm)])
            for channels in reversed(self.widths)
        )
        self.out_channels = width

    def decode(self, maps: Sequence[Tensor]) -> Tensor:
        total: Tensor | None = None
        heard: Tensor | None = None
        ratios = [1.0, *reversed(self.ratios())]
        for part, found, ratio, stride in zip(
            self.decoder, reversed(maps), ratios, reversed(self.strides), strict=True
        ):
            narrow, smooth = part.children()
            own = narrow(found)
            heard = own if heard is None else own + functional.interpolate(heard, scale_factor=ratio)
            fine = smooth(heard)
            if stride > self.stride:
                fine = functional.interpolate(fine, scale_factor=stride / self.stride, mode="bilinear")
            total = fine if total is None else total + fine
        assert total is not None
        return total
