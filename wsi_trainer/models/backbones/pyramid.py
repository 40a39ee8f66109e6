"""What U-Net and FPN have in common: the maps of an encoder, one of each size, made into one as fine as the finest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones.base import Backbone, stages_of
from wsi_trainer.models.backbones.named import make_backbone


@runtime_checkable
class Encoder(Protocol):
    """A network that gives the maps inside it."""

    def maps_at(self, x: Tensor, places: Sequence[int]) -> list[Tensor]:
        """The maps at these places, in order."""
        ...

    def sizes(self) -> list[tuple[int, int]]:
        """Channels and stride of the map at each place."""
        ...


class PyramidBackbone(Backbone):
    """An encoder whose last map of each size goes to a decoder.

    The slide is continued at its end, by repeating the last row and column, until the coarsest stride divides its
    sides, so that the maps lie exactly on each other. The map that comes out has the stride of the encoder's finest.

    Attributes:
        decoder: The parts that make one map of those of the encoder, in order.
        widths: Channels of the encoder's maps, from fine to coarse.
        strides: Pixels of the slide for one position of each.
    """

    decoder: nn.ModuleList

    def __init__(self, encoder: nn.Module | str) -> None:
        super().__init__()
        self.encoder = make_backbone(encoder)
        self._places, self.widths, self.strides = _last_of_each_size(self.encoder, type(self).__name__)
        self.stride = self.strides[0]

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        coarsest = self.strides[-1]
        x = functional.pad(x, (0, -width % coarsest, 0, -height % coarsest), mode="replicate")
        maps = cast(Encoder, self.encoder).maps_at(x, self._places)
        return self.decode(maps)[:, :, : -(-height // self.stride), : -(-width // self.stride)]

    def decode(self, maps: Sequence[Tensor]) -> Tensor:
        """One map, of the finest one's size, made of those of the encoder from fine to coarse."""
        raise NotImplementedError

    def ratios(self) -> list[float]:
        """How many times finer each map is than the next."""
        return [coarse / fine for fine, coarse in pairwise(self.strides)]

    def stages(self) -> list[nn.Module]:
        return [*stages_of(self.encoder), *self.decoder]


def _last_of_each_size(encoder: nn.Module, decoder: str) -> tuple[list[int], list[int], list[int]]:
    """Places, channels and strides of the last map of each size, from fine to coarse."""
    name = getattr(encoder, "name", type(encoder).__name__)
    if not isinstance(encoder, Encoder):
        raise UserError(
            f"the encoder {name} of {decoder} does not give its inner maps; name a class of wsi_trainer.models such "
            "as ResNet, or timm:NAME"
        )
    sizes = encoder.sizes()
    last = {stride: (place, channels) for place, (channels, stride) in enumerate(sizes)}
    strides = sorted(last)
    if strides[-1] > 1 and len(strides) < 2:
        raise UserError(
            f"all maps of the encoder {name} have the stride {strides[0]}, and {decoder} joins maps of several sizes; "
            "choose a convolutional network as encoder"
        )
    if any(coarse % fine for fine, coarse in pairwise(strides)):
        raise UserError(
            f"the maps of the encoder {name} have the strides {strides}, of which each must divide the next"
        )
    return [last[stride][0] for stride in strides], [last[stride][1] for stride in strides], strides
