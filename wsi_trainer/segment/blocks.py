"""The predicted classes of a slide, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_plugin import Box, TiledModule, materialize
from wsi_trainer.models import SlideClassifier


@dataclass(frozen=True, eq=False)
class Found:
    """What is predicted of a box of the slide."""

    box: Box
    classes: NDArray[np.uint8]
    """The place of each pixel's most likely class."""
    probability: NDArray[np.float32] | None
    """Of that class, where it was asked for."""


class OneBlock(nn.Module):
    """The most likely class of each pixel of a box of the slide, and perhaps its probability, as maps of one number for
    each pixel: what else the slide has is not computed.
    """

    def __init__(self, model: SlideClassifier, probability: bool = False) -> None:
        super().__init__()
        self.model = model
        self.probability = probability

    def forward(self, image: Tensor, box: Box) -> Tensor:
        (top, left), (bottom, right) = box.lo, box.hi
        logits = self.model(image)[:, :, top:bottom, left:right]
        if not self.probability:
            return logits.argmax(dim=1).to(torch.uint8)
        highest = logits.softmax(dim=1).amax(dim=1)
        return torch.cat([logits.argmax(dim=1).to(highest.dtype), highest])  # one map, so that it is computed once


def blocks_of(height: int, width: int, side: int) -> list[Box]:
    """The image in squares, those at the end smaller."""
    return [
        Box((top, left), (min(top + side, height), min(left + side, width)))
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def predicted(
    model: SlideClassifier, image: Tensor, side: int, budget: int | str | None, probability: bool = False
) -> Iterator[Found]:
    """Block by block what is predicted: it is that of the whole slide, halos and statistics included.

    Args:
        model: The trained network.
        image: The slide, dense or a `LazyImage`.
        side: Pixels of a block.
        budget: Device memory, by tile-by-tile execution; None runs plain PyTorch, each time on the whole slide.
        probability: Whether to say how probable the class of each pixel is. A block takes more memory then.
    """
    model.eval()
    step: nn.Module = OneBlock(model, probability)
    if budget is not None:
        step = TiledModule(step, budget=budget)
    for box in blocks_of(image.shape[2], image.shape[3], side):
        with torch.no_grad():
            found = materialize(step(image, box)).cpu().numpy()
        yield Found(box, found[0].astype(np.uint8), found[1].astype(np.float32) if probability else None)
