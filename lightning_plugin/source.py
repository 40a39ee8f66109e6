"""Sources of pixels: the interface between the engine and an application."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.private import FakeTensor, Version, dense_bytes, version


class TileSource:
    """Image that is read box by box and never held whole. Subclass it and write ``read``.

    ``shape`` is ``(N, C, *spatial)``. ``read`` returns the tensor ``(N, C, *box.extent)`` of a box inside the image, in
    the order of memory that ``memory_format`` says, the same for all boxes; it may be called from several threads.

    Pixels must not change while a step lasts: backward reads them again.

    Attributes:
        shape: The shape of the image.
        dtype: The type of its pixels.
        instances: Number of first dimensions that count images, if the source can read some of its images: 1 for a
            batch or a bag of patches ``(K, C, *spatial)``, 2 for a batch of bags ``(N, K, C, *spatial)``. Its boxes
            begin with an axis for each of these dimensions: ``read`` of ``[3:5 x 0:64 x 0:64]`` returns images 3 and 4.
            None if its boxes have spatial axes only.
        memory_format: Memory format of the pixels.
        reads_ahead: True if ``prefetch`` reads; a plan then has room for the pixels.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    instances: int | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    reads_ahead: bool = False

    def read(self, box: Box) -> Tensor:
        """Return the pixels of a box."""
        raise NotImplementedError

    def constant(self, box: Box) -> Tensor | None:
        """Return the value of each channel if the box is known, without reading, to be constant; else None."""
        return None

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Begin to read the boxes of the next tile, while the engine computes this one."""

    def close(self) -> None:
        """Close files and free memory. A source that is read again opens them again."""

    @property
    def version(self) -> Any:
        """Version of the pixels, compared by ``==``: a step that would mix two versions is refused. None is not
        checked."""
        return None


#: Number of elements in each dimension of a tensor that are compared, to detect that it was overwritten.
SAMPLED = 4

#: Most channels of an image that is recognised with its channels elsewhere than in dimension 1.
COLOURS = (1, 3, 4)
#: Smallest number of positions along each other dimension of a tensor whose last dimension is taken for channels.
MANY = 64


def likely_instances(shape: Sequence[int]) -> int:
    """Guess the number of first dimensions that count images: ``(N, K, C, H, W)`` and ``(N, C, D, H, W)`` differ in the
    number of channels. A wrong guess costs tiling, never exactness."""
    return 2 if len(shape) == 5 and shape[2] in COLOURS and not {shape[1], shape[4]} & set(COLOURS) else 1


def channels_lie_last(shape: Sequence[int]) -> bool:
    """Guess from the shape if channels are the last dimension, as the coordinates of points ``(N, P, 2)`` are. A wrong
    guess costs tiling, never exactness."""
    return shape[-1] <= max(COLOURS) < MANY <= min(shape[1:-1])


def instances_of(image: TileSource) -> int:
    """Return the number of a source's first dimensions that count images."""
    return likely_instances(image.shape) if image.instances is None else image.instances


def together(image: TileSource) -> bool:
    """True if a source of several images reads each box of all of them."""
    return image.instances is None and any(n > 1 for n in image.shape[: instances_of(image)])


def understood(image: TileSource, box: Box) -> Box:
    """Convert a box that begins with the axes of images to the axes of a source's boxes."""
    lead = instances_of(image) if image.instances is None else 0
    return Box(box.lo[lead:], box.hi[lead:])


def read_part(image: TileSource, box: Box) -> Tensor:
    """Read a box that begins with the axes of images; from a source that reads all images, it is cut out."""
    pixels = image.read(understood(image, box))
    if image.instances is None:
        for d in range(instances_of(image)):
            pixels = pixels.narrow(d, box.lo[d], box.hi[d] - box.lo[d])
    return pixels


def sampled(tensor: Tensor) -> bytes:
    """Return some elements of a tensor on the CPU: they detect writes that PyTorch does not count, such as NumPy's."""
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
        return b""
    steps = [max(1, -(-size // SAMPLED)) for size in tensor.shape]
    some = tensor.detach()[tuple(slice(step // 2, None, step) for step in steps)]
    return dense_bytes(some).tobytes() if some.numel() else b""


class TensorSource(TileSource):
    """Tensor in memory; a box with spatial axes only is read of all its images."""

    instances: int

    def __init__(self, tensor: Tensor, instances: int = 1) -> None:
        self.tensor, self.instances = tensor, instances
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

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


class ArraySource(TileSource):
    """Array ``(N, C, *spatial)`` that is read by slices: a ``memmap`` of NumPy's, an array of Zarr's or HDF5's."""

    instances = 1

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, tuple(array.shape)
        self.dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype

    def read(self, box: Box) -> Tensor:
        first, *space = (slice(lo, hi) for lo, hi in box.intervals())
        values = torch.from_numpy(np.array(self.array[(first, slice(None), *space)]))
        release_pages(self.array)
        return values


def release_pages(array: Any) -> None:
    """Release the mapped pages of an array in a file, which count as the process's memory; what was written stays."""
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


class BatchSource(TileSource):
    """Batch of images of one size."""

    def __init__(self, images: Sequence[TileSource]) -> None:
        self.images = tuple(images)
        first = self.images[0]
        for i, image in enumerate(self.images):
            if image.shape[1:] != first.shape[1:] or image.dtype != first.dtype:
                raise ValueError(
                    f"images of one batch must agree in channels, size and dtype: image 0 is {first.shape} "
                    f"{first.dtype}, image {i} is {image.shape} {image.dtype}. Use a batch size of 1, or a collate "
                    "function that keeps a list."
                )
        self.shape = (sum(i.shape[0] for i in self.images), *first.shape[1:])
        self.dtype, self.instances, self.memory_format = first.dtype, instances_of(first), first.memory_format
        self.reads_ahead = any(image.reads_ahead for image in self.images)

    @property
    def version(self) -> tuple[Any, ...]:
        return tuple(image.version for image in self.images)

    def among(self, box: Box) -> Iterator[tuple[TileSource, Box]]:
        """Yield the images in a box, each with its part of the box."""
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

    def prefetch(self, boxes: Iterable[Box]) -> None:
        for box in boxes:
            for image, part in self.among(box):
                image.prefetch([understood(image, part)])

    def close(self) -> None:
        for image in self.images:
            image.close()


def batch(images: Sequence[TileSource]) -> TileSource:
    """Make a batch of images; a single one is returned as it is."""
    return images[0] if len(images) == 1 else BatchSource(images)
