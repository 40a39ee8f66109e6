"""A sink for `lightning_plugin.infer` that lies on the slide: OME-Zarr with a pyramid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zarr
from torch import Tensor

from lightning_plugin import Box, PathSink, SinkError
from wsi_trainer.regions.ngff import add_levels, create_image, create_labels
from wsi_trainer.slide.geometry import PROVENANCE
from wsi_trainer.slide.views import Image


class SlideSink(PathSink):
    """OME-Zarr that viewers lay over the slide: of classes a label image, of other values an image with channels.

    A coarser level takes the upper left of four pixels. The result has one position for each pixel of the view, or for
    each square of pixels, as behind a stride.

    Args:
        path: The store, NAME.ome.zarr.
        view: What the network sees of the slide.
        classes: The names of the classes, if the values are classes; the first is background.

    Example:
        >>> view = Image(Slide.open("slide.svs"), mpp=0.5)                                # doctest: +SKIP
        >>> sink = SlideSink("found.ome.zarr", view, ["normal", "tumour"])                # doctest: +SKIP
        >>> infer(net, view, sink, output="classes", budget="2GiB")                       # doctest: +SKIP
    """

    array: Any

    def __init__(self, path: str | Path, view: Image, classes: Sequence[str] = ()) -> None:
        super().__init__(path)
        self.view, self.classes = view, classes

    def open(self, shape: tuple[int, ...], dtype: torch.dtype, resumes: bool) -> None:
        """Make the store, or open that of an interrupted run.

        Raises:
            SinkError: The result is not one map of this slide.
        """
        is_label = len(self.classes) > 0
        if len(shape) != 3 + (not is_label) or shape[0] != 1:
            expected = "classes (1, height, width)" if is_label else "values (1, channels, height, width)"
            raise SinkError(f"{self.path} takes {expected}, and the result has the shape {shape}")
        if is_label and dtype != torch.uint8:
            raise SinkError(f'{self.path} takes classes of 8 bits, and the result is {dtype}: give output="classes"')
        pixels = self.view.shape[2:]
        stride = round(max(pixels) / max(shape[-2:]))
        if any(part not in (side // stride, -(-side // stride)) for side, part in zip(pixels, shape[-2:], strict=True)):
            raise SinkError(f"the result of shape {shape} has no place on the slide, of {pixels} pixels")
        self.place = self.view.place.coarser(stride)
        if resumes and (self.path / "0" / "zarr.json").exists():
            self.array = zarr.open_array(self.path / "0", mode="r+")
        elif is_label:
            self.array = create_labels(self.path, (shape[1], shape[2]), self.classes, self.place)
        else:
            kind = str(dtype).removeprefix("torch.")
            self.array = create_image(
                self.path, shape[1:], kind, self.place, {PROVENANCE: {"place": self.place.record()}}
            )

    def write(self, box: Box, values: Tensor) -> None:
        """Write a box."""
        self.array[tuple(slice(lo, hi) for lo, hi in list(box.intervals())[1:])] = values[0].numpy()

    def close(self) -> None:
        """Add the pyramid."""
        add_levels(self.path, self.place)
