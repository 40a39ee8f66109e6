"""Where pixels come from: the one protocol in which the engine and an application meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.private import FakeTensor, Version, version


@runtime_checkable
class TileSource(Protocol):
    """An image that is read region by region and is nowhere held whole.

    ``shape`` is ``(N, C, *spatial)``. ``read`` returns the tensor ``(N, C, *box.extent)`` of a box inside the image, in
    contiguous or channels-last order, the same for all boxes; it may be called from several threads. ``constant``
    returns the value of each channel where the source knows, without reading, that the box holds nothing else, and None
    where it does not know.

    A source that can read some of its images has ``instances``: how many of its first dimensions count images, 1 for a
    batch or a bag of patches ``(K, C, *spatial)``, 2 for a batch of bags ``(N, K, C, *spatial)``. Its boxes begin with
    an axis for each of these dimensions: ``read`` of ``[3:5 x 0:64 x 0:64]`` returns images 3 and 4.

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


#: Of each dimension of a tensor so many elements are looked at, to see whether it was filled anew.
SAMPLED = 4

#: How many channels an image can have to be recognised with its channels elsewhere than in dimension 1.
COLOURS = (1, 3, 4)


def likely_instances(shape: Sequence[int]) -> int:
    """How many of the first dimensions count images: ``(N, K, C, H, W)`` is told from ``(N, C, D, H, W)`` by the number
    of channels. A wrong guess costs tiling, never exactness."""
    return 2 if len(shape) == 5 and shape[2] in COLOURS and not {shape[1], shape[4]} & set(COLOURS) else 1


def instances_of(image: TileSource) -> int:
    """How many of a source's first dimensions count images."""
    said = getattr(image, "instances", None)
    return likely_instances(image.shape) if said is None else int(said)


def says_instances(image: TileSource) -> bool:
    """Whether a source's boxes say which of its images are meant."""
    return getattr(image, "instances", None) is not None


def together(image: TileSource) -> bool:
    """Whether a source reads a box of all of its images, where there are several."""
    return not says_instances(image) and any(n > 1 for n in image.shape[: instances_of(image)])


def understood(image: TileSource, box: Box) -> Box:
    """A box that begins with an axis for each dimension of images, as a source wants it."""
    lead = 0 if says_instances(image) else instances_of(image)
    return Box(box.lo[lead:], box.hi[lead:])


def read_part(image: TileSource, box: Box) -> Tensor:
    """The pixels of a box that begins with an axis for each dimension of images, whether or not the source can read
    some of its images."""
    pixels = image.read(understood(image, box))
    if not says_instances(image):
        for d in range(instances_of(image)):
            pixels = pixels.narrow(d, box.lo[d], box.hi[d] - box.lo[d])
    return pixels


def prefetches(image: TileSource) -> bool:
    """Whether a source wants to hear of boxes before they are read."""
    return hasattr(image, "prefetch")


def version_of(image: TileSource) -> Any:
    """What changes when a source's pixels do, where it says so."""
    return getattr(image, "version", None)


def sampled(tensor: Tensor) -> bytes:
    """Some elements of a tensor in a processor's memory: they show that others have filled it anew, NumPy say, of which
    PyTorch knows nothing."""
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
        return b""
    steps = [max(1, -(-size // SAMPLED)) for size in tensor.shape]
    some = tensor.detach()[tuple(slice(step // 2, None, step) for step in steps)]
    return some.contiguous().view(torch.uint8).numpy().tobytes() if some.numel() else b""


@dataclass(frozen=True, eq=False)
class TensorSource:
    """A tensor that is already in memory, read where it lies; a box of space alone is read of all its images."""

    tensor: Tensor
    instances: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def version(self) -> tuple[Version, bytes] | None:
        found = version(self.tensor)
        return None if found is None else (found, sampled(self.tensor))

    def read(self, box: Box) -> Tensor:
        parts = [slice(lo, hi) for lo, hi in box.intervals()]
        if box.ndim == self.tensor.dim() - 1 - self.instances:
            parts = [slice(None)] * self.instances + parts
        index: Any = (*parts[: self.instances], slice(None), *parts[self.instances :])
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

    @property
    def instances(self) -> int:
        return instances_of(self.images[0])

    def among(self, box: Box) -> Iterator[tuple[TileSource, Box]]:
        """The images of a box, each with its own part of it."""
        start = 0
        for image in self.images:
            lo, hi = max(box.lo[0] - start, 0), min(box.hi[0] - start, image.shape[0])
            if lo < hi:
                yield image, box.replace(0, lo, hi)
            start += image.shape[0]

    def read(self, box: Box) -> Tensor:
        return torch.cat([read_part(image, part) for image, part in self.among(box)])

    def constant(self, box: Box) -> Tensor | None:
        values = [image.constant(understood(image, part)) for image, part in self.among(box)]
        first = values[0]
        if first is None or any(v is None or not torch.equal(v, first) for v in values[1:]):
            return None
        return first


@dataclass(frozen=True, eq=False)
class AnnouncedBatchSource(BatchSource):
    """A batch with sources that read ahead."""

    def prefetch(self, boxes: Iterable[Box]) -> None:
        for box in boxes:
            for image, part in self.among(box):
                if prefetches(image):
                    image.prefetch([understood(image, part)])  # type: ignore[attr-defined]


def batch(images: Sequence[TileSource]) -> TileSource:
    """Some images side by side; one alone is itself."""
    if len(images) == 1:
        return images[0]
    return (AnnouncedBatchSource if any(map(prefetches, images)) else BatchSource)(tuple(images))
