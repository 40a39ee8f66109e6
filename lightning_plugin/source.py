"""Where pixels come from: the one protocol in which the engine and an application meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.private import version


@runtime_checkable
class TileSource(Protocol):
    """An image that is read region by region and is nowhere held whole.

    ``shape`` is ``(N, C, *spatial)``. ``read`` returns the tensor ``(N, C, *box.extent)`` of a box inside the image;
    it may be called from several threads. ``constant`` returns the value of each channel where the source knows,
    without reading, that the box holds nothing else, and None where it does not know.

    Pixels must not change while a step lasts: backward reads them again. A source whose pixels may change can say so
    with ``version``, anything that is equal as long as they are the same; a step that would mix two versions is then
    refused. Without it, nothing is checked.

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


def version_of(image: TileSource) -> Any:
    """What changes when a source's pixels do, where it says so."""
    return getattr(image, "version", None)


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

    @property
    def version(self) -> int | None:
        return version(self.tensor)

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

    @property
    def version(self) -> tuple[Any, ...]:
        return tuple(version_of(i) for i in self.images)

    def read(self, box: Box) -> Tensor:
        return torch.cat([i.read(box) for i in self.images])

    def constant(self, box: Box) -> Tensor | None:
        values = [i.constant(box) for i in self.images]
        first = values[0]
        if first is None or any(v is None or not torch.equal(v, first) for v in values[1:]):
            return None
        return first


@dataclass(frozen=True, eq=False)
class AnnouncedBatchSource(BatchSource):
    """A batch with sources that read ahead."""

    def prefetch(self, boxes: Iterable[Box]) -> None:
        boxes = list(boxes)
        for image in self.images:
            if prefetches(image):
                image.prefetch(boxes)  # type: ignore[attr-defined]


def batch(images: Sequence[TileSource]) -> TileSource:
    """Some images side by side; one alone is itself."""
    if len(images) == 1:
        return images[0]
    return (AnnouncedBatchSource if any(map(prefetches, images)) else BatchSource)(tuple(images))
