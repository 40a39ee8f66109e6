"""The predicted classes of a slide, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_plugin import Box, TiledModule, materialize
from wsi_trainer.models import SlideClassifier


class OneBlock(nn.Module):
    """The most likely class of each pixel of a box of the slide: what else the slide has is not computed."""

    def __init__(self, model: SlideClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, box: Box) -> Tensor:
        (top, left), (bottom, right) = box.lo, box.hi
        return self.model(image)[:, :, top:bottom, left:right].argmax(dim=1).to(torch.uint8)


def blocks_of(height: int, width: int, side: int) -> list[Box]:
    """The image in squares, those at the end smaller."""
    return [
        Box((top, left), (min(top + side, height), min(left + side, width)))
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def predicted(
    model: SlideClassifier, image: Tensor, side: int, budget: int | str | None
) -> Iterator[tuple[Box, NDArray[np.uint8]]]:
    """Each block with its classes: those of the whole slide, halos and statistics included.

    Args:
        model: The trained network.
        image: The slide, dense or a `LazyImage`.
        side: Pixels of a block.
        budget: Device memory, by tile-by-tile execution; None runs plain PyTorch, each time on the whole slide.
    """
    model.eval()
    step: nn.Module = OneBlock(model)
    if budget is not None:
        step = TiledModule(step, budget=budget)
    for box in blocks_of(image.shape[2], image.shape[3], side):
        with torch.no_grad():
            found = materialize(step(image, box))
        yield box, found[0].cpu().numpy()
