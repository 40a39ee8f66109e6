"""Where pixels come from: the one protocol in which the engine and an application meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_plugin.boxes import Box


@runtime_checkable
class TileSource(Protocol):
    """An image that is read region by region and is nowhere held whole.

    ``shape`` is ``(N, C, *spatial)``. ``read`` returns the tensor ``(N, C, *box.extent)`` of a box inside the image;
    it may be called from several threads. ``constant`` returns the value of each channel where the source knows,
    without reading, that the box holds nothing else, and None where it does not know.

    A source may also have ``prefetch(boxes)``: it hears of the boxes of the next tile while the engine works on this
    one, and may begin to read them. A plan has room for their pixels.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box) -> Tensor: ...

    def constant(self, box: Box) -> Tensor | None: ...


def prefetches(image: TileSource) -> bool:
    """Whether a source wants to hear of boxes before they are read."""
    return hasattr(image, "prefetch")


@dataclass(frozen=True, eq=False)
class TensorSource:
    """A tensor that is already in memory, read where it lies."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> Tensor:
        index: Any = (..., *(slice(lo, hi) for lo, hi in box.intervals()))
        return self.tensor[index]

    def constant(self, box: Box) -> Tensor | None:
        return None


@dataclass(frozen=True, eq=False)
class BatchSource:
    """Images of one size, side by side in a batch."""

    images: tuple[TileSource, ...]

    def __post_init__(self) -> None:
        first = self.images[0]
        for i, image in enumerate(self.images):
            if image.shape[1:] != first.shape[1:] or image.dtype != first.dtype:
                raise ValueError(
                    f"images of one batch must agree in channels, size and dtype: image 0 is {first.shape} "
                    f"{first.dtype}, image {i} is {image.shape} {image.dtype}. Use a batch size of 1, or a collate "
                    "function that keeps a list."
                )

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(i.shape[0] for i in self.images), *self.images[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.images[0].dtype

    def read(self, box: Box) -> Tensor:
        return torch.cat([i.read(box) for i in self.images])

    def constant(self, box: Box) -> Tensor | None:
        values = [i.constant(box) for i in self.images]
        first = values[0]
        if first is None or any(v is None or not torch.equal(v, first) for v in values[1:]):
            return None
        return first


def batch(images: Sequence[TileSource]) -> TileSource:
    return images[0] if len(images) == 1 else BatchSource(tuple(images))
