"""Training works: a network, and an image or a bag of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: The value of background.
VALUE = 0.9


@dataclass(frozen=True)
class Work:
    """One step of training.

    Attributes:
        width: The width, as a part of the published network's.
        tile: The side of lightstream's tiles.
        background: The share of the image that is one value.
        patches: The number of patches of a bag.
        rival: The way of which ours may take no more memory.
        aim: The factor by which ours is to be faster than it.
    """

    network: str
    side: int
    width: float = 1.0
    tile: int = 0
    background: float = 0.0
    patches: int = 0
    rival: str = "lightstream"
    aim: float | None = None

    @property
    def kind(self) -> str:
        return "bag" if self.patches else "background" if self.background else "image"

    @property
    def name(self) -> str:
        width = "" if self.width == 1 else f" x{self.width:g}"
        background = f" {self.background:.0%} background" if self.background else ""
        patches = f" {self.patches} patches of" if self.patches else ""
        tile = f" tile {self.tile}" if self.tile else ""
        return f"{self.network}{width}{patches} {self.side}{background}{tile}"

    def image(self) -> Tensor:
        """The pixels, the same in every process."""
        torch.manual_seed(1)
        if self.background:
            return background_image(self.side, 1 - self.background)
        return torch.randn(self.patches or 1, 3, self.side, self.side)


def tissue(side: int, share: float) -> tuple[int, int]:
    """Begin and end of the tissue on both axes: a share of the image, one square in the middle."""
    inner = round(side * math.sqrt(share))
    first = (side - inner) // 2
    return first, first + inner


def background_image(side: int, share: float) -> Tensor:
    """An image of which a share is tissue."""
    first, last = tissue(side, share)
    x = torch.full((1, 3, side, side), VALUE)
    x[..., first:last, first:last] = torch.randn(3, last - first, last - first)
    return x


#: Some minutes in all: sizes so small that ratios say which way is what, and not how large slides behave.
QUICK = (
    Work("vgg16", 1024, width=0.25, tile=640),
    Work("resnet18", 1536, width=0.25, tile=1280),
    Work("resnet18", 1536, width=0.25, tile=1280, background=0.8),
    Work("resnet18", 128, width=0.5, patches=32, rival="caching"),
)
#: Hours. A tile of 1,984 is the best for lightstream's ResNet-34 here; 1,920 the size that its own examples have.
FULL = (
    Work("vgg16", 2048, width=0.5, tile=640, aim=2.5),
    Work("resnet18", 2048, tile=1280, aim=5),
    Work("resnet18", 2048, tile=1280, background=0.8, aim=15),
    Work("resnet18", 256, patches=64, rival="caching"),
    Work("resnet34", 2048, tile=1984),
    Work("resnet34", 2048, tile=1920, aim=8),
)
SETS = {"quick": QUICK, "full": FULL}
