"""Label images, a number for each pixel: OME-Zarr labels and TIFF masks, read box by box where they lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.errors import UserError
from wsi_trainer.foreign import Unreadable, open_file
from wsi_trainer.foreign.arrays import checked_array, member, open_zarr
from wsi_trainer.regions.legend import Legend
from wsi_trainer.regions.region import RegionsError
from wsi_trainer.slide.formats.tiff_pages import check_pages
from wsi_trainer.slide.geometry import SlideTransform

UNKNOWN = -1
NEAR = 0.02
"""How far from a whole number the ratio of slide to label may be: sides are rounded where slides are shrunk."""


def open_labels(path: Path) -> Any:
    """The array of labels, (height, width), of which nothing is read yet."""
    try:
        array = _finest(path) if path.is_dir() else _of_tiff(path)
    except Unreadable as error:
        raise RegionsError(path, f"is no label image: {error.reason}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, tifffile.TiffFileError) as error:
        raise RegionsError(path, f"is no label image: {error}") from error
    if len(array.shape) != 2:
        raise RegionsError(path, f"has the shape {tuple(array.shape)}; a label image has a height and a width only")
    if 0 in array.shape:
        raise RegionsError(path, f"has {array.shape[0]} x {array.shape[1]} labels, which is nothing")
    if array.dtype not in (np.dtype("uint8"), np.dtype("uint16"), np.dtype("bool")):
        raise RegionsError(path, f"holds {array.dtype}; a label image holds uint8 or uint16")
    return array


def _finest(path: Path) -> Any:
    """Level 0 of an OME-Zarr label, or an array by itself."""
    node = open_zarr(path)
    if not isinstance(node, zarr.Array):
        attributes: Any = dict(node.attrs)
        said = attributes.get("ome", attributes)  # version 0.4 writes them one level higher
        return member(path, node, said["multiscales"][0]["datasets"][0]["path"])
    return checked_array(path, node)


def _of_tiff(path: Path) -> Any:
    """The first level of a TIFF; tiles are decoded as they are asked for."""
    file = open_file(path)
    try:
        # Opened without its name: tifffile would look beside the file for others that its metadata name.
        page: Any = tifffile.TiffFile(file, name="labels").series[0].levels[0]
        check_pages(path, (page.keyframe,))
        _check_counts(path, np.asarray(page.keyframe.databytecounts), os.fstat(file.fileno()).st_size)
        return zarr.open(page.aszarr(), mode="r")
    except Exception as error:  # a damaged directory makes tifffile raise whatever it stumbles over
        file.close()
        if isinstance(error, UserError | MemoryError):
            raise
        if isinstance(error, OSError) and error.strerror:  # of the system, and nothing about what the file holds
            raise RegionsError(path, error.strerror) from error
        raise RegionsError(path, f"is no label image: broken TIFF ({type(error).__name__}: {error})") from error


def _check_counts(path: Path, counts: NDArray[Any], size: int) -> None:
    """Refuse a TIFF one of whose tiles claims more bytes than the file has: so much memory would be asked for."""
    wrong = counts[(counts < 0) | (counts > size)]
    if len(wrong):
        raise RegionsError(path, f"is no label image: broken TIFF: a tile of {wrong[0]} bytes in a file of {size}")


class LabelSource(TileSource):
    """A `TileSource` (1, 1, height, width) of bytes made of a label image that covers the slide.

    A pixel of the image has the label in which its centre lies.
    """

    dtype = torch.uint8

    def __init__(
        self, labels: Any, table: NDArray[np.int16], path: Path, shape: Sequence[int], cut: NDArray[Any]
    ) -> None:
        """Keep the array, the value of each label, and where the image lies: rows (y and x) of corner and scale."""
        self.shape = (1, 1, *shape)
        self.path = path
        self._labels, self._table, self._cut = labels, table, cut

    @staticmethod
    def of(labels: Any, legend: Legend, size: tuple[int, int], place: SlideTransform | None, path: Path) -> LabelSource:
        """The map of an image of this size. Without a place the labels cover that image, else its slide."""
        place = place or SlideTransform(size)
        if place.origin != (0.0, 0.0):
            raise RegionsError(
                path, "is a label image of a slide that was cropped; use outlines, or convert without --crop"
            )
        factors = []
        for side, label, scale in zip(size, labels.shape, place.scale):
            ratio = side * scale / label
            whole = max(round(ratio), 1) if ratio > 1 - NEAR else 1 / max(round(1 / ratio), 1)
            if abs(ratio / whole - 1) > NEAR:
                slide = (size[0] * place.scale[0], size[1] * place.scale[1])
                raise RegionsError(
                    path,
                    f"has {labels.shape[0]} x {labels.shape[1]} labels and the slide about {slide[0]:.0f} x "
                    f"{slide[1]:.0f} pixels; a label image is as large as its slide, or a whole number of times less",
                )
            factors.append(scale / whole)
        return LabelSource(labels, _table(legend, path), path, size, np.array(factors))

    def read(self, box: Box) -> Tensor:
        places = [
            np.minimum(((np.arange(lo, hi) + 0.5) * factor).astype(np.int64), end - 1)
            for (lo, hi), factor, end in zip(box.intervals(), self._cut, self._labels.shape)
        ]
        rows, columns = places
        if not (len(rows) and len(columns)):
            return torch.empty((1, 1, *box.extent), dtype=self.dtype)
        part = self._part(slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
        values = self._table[part[np.ix_(rows - rows[0], columns - columns[0])].astype(np.uint16)]
        if (values == UNKNOWN).any():
            label = int(part[np.ix_(rows - rows[0], columns - columns[0])][values == UNKNOWN][0])
            raise RegionsError(
                self.path, f"has the label {label}, which model.task.init_args.drawn does not name; add it as '{label}'"
            )
        return torch.from_numpy(values.astype(np.uint8))[None, None]

    def _part(self, rows: slice, columns: slice) -> NDArray[Any]:
        try:
            return np.asarray(self._labels[rows, columns])
        except (UserError, MemoryError):
            raise
        except Exception as error:  # each codec raises its own kind
            raise RegionsError(self.path, f"cannot be decoded ({type(error).__name__}: {error})") from error

    def constant(self, box: Box) -> Tensor | None:
        return None


def _table(legend: Legend, path: Path) -> NDArray[np.int16]:
    """The value of a pixel for each label; 0 is the ground unless it is named."""
    table = np.full(1 << 16, UNKNOWN, np.int16)
    table[0] = legend.ground
    for name, meant in legend.drawn.items():
        if name.isdecimal() and int(name) < len(table):
            table[int(name)] = legend.value(meant)
    if (table == UNKNOWN).sum() == len(table) - 1 and "0" not in legend.drawn:
        raise RegionsError(
            path, "is a label image, whose classes have numbers; say in model.task.init_args.drawn what they mean, "
            "such as {'1': " + legend.classes[-1] + "}"
        )  # fmt: skip
    return table
