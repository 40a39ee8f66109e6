"""Which tensors of a batch are images to be tiled, and how they become lazy.

A tensor is an image if it is large and has spatial dimensions. PyTorch does not say which dimension holds
channels, so it is read off the shape; a wrong guess costs tiling (an operator then runs whole), never
exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_plugin.capture.lazy import LazyImage
from lightning_plugin.settings import Settings
from lightning_plugin.source import COLOURS, TensorSource


@dataclass(frozen=True)
class Arrangement:
    """How a tensor lies: the dimensions before ``channel`` are batch, all others are space.

    ``channel`` is None where there are no channels.
    """

    channel: int | None

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype) -> Arrangement | None:
        """The arrangement of a tensor, or None where it has no space to tile."""
        rank = len(shape)
        if rank < 3 or 0 in shape:
            return None
        if rank == 3:
            if not dtype.is_floating_point:
                return Arrangement(None)  # (N, H, W): the class of every pixel
            return Arrangement(1) if shape[2] > shape[1] else None  # else (N, positions, features)
        if shape[1] in COLOURS:
            return Arrangement(1)
        if rank == 4 and shape[3] in COLOURS:
            return Arrangement(3)
        if rank == 5 and shape[2] in COLOURS and shape[4] not in COLOURS:
            return Arrangement(2)  # (N, images, C, H, W): a bag of images
        return Arrangement(1)


def lazy_image(tensor: Tensor, arrangement: Arrangement, device: torch.device, settings: Settings) -> Tensor:
    """A dense tensor, left where it is, as a lazy tensor of the same shape whose tiles go to ``device``."""
    channel = arrangement.channel
    if channel is None:
        return LazyImage.from_tensor(tensor.unsqueeze(1), device=device, settings=settings).squeeze(1)
    if channel == tensor.dim() - 1:
        image = LazyImage.from_tensor(tensor.movedim(-1, 1), device=device, settings=settings)
        return image.movedim(1, -1)
    if channel == 2:
        return LazyImage(TensorSource(tensor, 2), device=device, requires_grad=tensor.requires_grad, settings=settings)
    return LazyImage.from_tensor(tensor, device=device, settings=settings)


def is_image(tensor: Tensor, least: int) -> Arrangement | None:
    """How an ordinary tensor of at least ``least`` bytes lies, if it is an image."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex() or tensor.is_quantized or tensor.numel() * tensor.element_size() < least:
        return None
    return Arrangement.of(tensor.shape, tensor.dtype)
