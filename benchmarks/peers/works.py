"""Training works: a network, and an image or a bag of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: What glass looks like.
VALUE = 0.9


@dataclass(frozen=True)
class Work:
    """One step of training.

    ``width`` is of the published network's; ``tile`` lightstream's; ``glass`` the share of the image that is one value;
    ``patches`` how many there are, in a bag; ``rival`` the way of which ours may take no more memory, and ``aim`` how
    many times faster than it ours is to be.
    """

    network: str
    side: int
    width: float = 1.0
    tile: int = 0
    glass: float = 0.0
    patches: int = 0
    rival: str = "lightstream"
    aim: float | None = None

    @property
    def kind(self) -> str:
        return "bag" if self.patches else "glass" if self.glass else "image"

    @property
    def name(self) -> str:
        width = "" if self.width == 1 else f" x{self.width:g}"
        glass = f" {self.glass:.0%} glass" if self.glass else ""
        patches = f" {self.patches} patches of" if self.patches else ""
        tile = f" tile {self.tile}" if self.tile else ""
        return f"{self.network}{width}{patches} {self.side}{glass}{tile}"

    def image(self) -> Tensor:
        """The pixels, the same in every process."""
        torch.manual_seed(1)
        if self.glass:
            return glassy(self.side, 1 - self.glass)
        return torch.randn(self.patches or 1, 3, self.side, self.side)


def tissue(side: int, share: float) -> tuple[int, int]:
    """Begin and end of the tissue on both axes: a share of the image, one square in the middle."""
    inner = round(side * math.sqrt(share))
    first = (side - inner) // 2
    return first, first + inner


def glassy(side: int, share: float) -> Tensor:
    """An image of which a share is tissue."""
    first, last = tissue(side, share)
    x = torch.full((1, 3, side, side), VALUE)
    x[..., first:last, first:last] = torch.randn(3, last - first, last - first)
    return x


#: Some minutes in all: sizes so small that ratios say which way is what, and not how large slides behave.
QUICK = (
    Work("vgg16", 1024, width=0.25, tile=640),
    Work("resnet18", 1536, width=0.25, tile=1280),
    Work("resnet18", 1536, width=0.25, tile=1280, glass=0.8),
    Work("resnet18", 128, width=0.5, patches=32, rival="caching"),
)
#: Hours. A tile of 1,984 is the best for lightstream's ResNet-34 here; 1,920 the size that its own examples have.
FULL = (
    Work("vgg16", 2048, width=0.5, tile=640, aim=2.5),
    Work("resnet18", 2048, tile=1280, aim=5),
    Work("resnet18", 2048, tile=1280, glass=0.8, aim=15),
    Work("resnet18", 256, patches=64, rival="caching"),
    Work("resnet34", 2048, tile=1984),
    Work("resnet34", 2048, tile=1920, aim=8),
)
SETS = {"quick": QUICK, "full": FULL}
