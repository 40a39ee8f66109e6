"""Targets of pixels: outlines or a label image as a map of classes that is read box by box and never whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tifffile
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.errors import UserError
from wsi_trainer.io.arrays import checked_array, member, open_zarr
from wsi_trainer.io.untrusted import Unreadable, open_file
from wsi_trainer.regions.outlines import Region, RegionsError, check_on_slide, read_regions
from wsi_trainer.regions.shapes import Edges, edges_of, fill, touches
from wsi_trainer.slide.formats.tiff_pages import check_pages, open_tiff
from wsi_trainer.slide.geometry import SlideTransform

IGNORED = 255
"""The value of a pixel without a class: no loss looks at it. A shifted slide has it where background comes in."""
IGNORE = "ignore"
"""The meaning of a region or an unmarked pixel that says nothing."""


@dataclass(frozen=True)
class Legend:
    """Names in annotation files, and the classes they stand for.

    Attributes:
        classes: The classes; a pixel's value is the place of its class.
        drawn: From the name in a file to a class or `ignore`, in the order of painting: what comes later lies on top.
        unmarked: The meaning of a pixel on which nothing is drawn: a class, or `ignore`.
    """

    classes: tuple[str, ...]
    drawn: Mapping[str, str] = field(default_factory=dict)
    unmarked: str = ""

    @staticmethod
    def of(classes: Sequence[str], drawn: Mapping[str, str] | None, unmarked: str | None) -> Legend:
        """The legend with its defaults: each class by its own name, and unmarked is the first."""
        legend = Legend(tuple(classes), dict(drawn or {name: name for name in classes}), unmarked or classes[0])
        for key, meant in (*legend.drawn.items(), ("unmarked", legend.unmarked)):
            if meant not in (*classes, IGNORE):
                raise ValueError(f"{key!r} is said to be {meant!r}, which is none of {', '.join(classes)} and {IGNORE}")
        return legend

    def value(self, meant: str) -> int:
        """The value of a pixel of a class, or of `ignore`."""
        return IGNORED if meant == IGNORE else self.classes.index(meant)

    @property
    def ground(self) -> int:
        """The value of a pixel on which nothing is drawn."""
        return self.value(self.unmarked)

    def painted(self, regions: Sequence[Region], path: Path) -> list[tuple[Region, int]]:
        """The regions from the lowest to the topmost, each with the value of its pixels."""
        order = {name: place for place, name in enumerate(self.drawn)}
        for region in regions:
            if region.name not in order:
                raise RegionsError(path, self._unknown(region.name))
        return [
            (region, self.ground if region.removes else self.value(self.drawn[region.name]))
            for region in sorted(regions, key=lambda region: order[region.name])
        ]

    def _unknown(self, name: str) -> str:
        which = f"a region of the class {name!r}" if name else "a region without a class"
        return (
            f"has {which}; the task knows {', '.join(map(repr, self.drawn))}. Say in model.task.init_args.drawn which "
            f"class it is, such as {{{name or repr('')}: {self.classes[-1]}}}, or {IGNORE}"
        )


def blocks_of(height: int, width: int, side: int) -> list[Box]:
    """The image in squares, those at the end smaller."""
    return [
        Box((top, left), (min(top + side, height), min(left + side, width)))
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


SIDE = 1024
"""Pixels. A larger box is asked for its one value, and cut in two where it has none; a smaller one is read."""
VALUES = 256
"""Number of values of a byte."""


def counted(source: TileSource, classes: int) -> Iterator[tuple[int, Tensor]]:
    """Box by box its number of pixels, and how many of them each class has; what is ignored is of none."""
    waiting = [Box.whole(source.shape[2:])]
    while waiting:
        box = waiting.pop()
        value = source.constant(box)
        if value is None and max(box.extent) > SIDE:
            waiting += _halves(box)
            continue
        values, times = (source.read(box), 1) if value is None else (value, box.positions)
        found = torch.bincount(values.flatten().long(), minlength=VALUES) * times
        yield box.positions, found[:classes]


def _halves(box: Box) -> list[Box]:
    """The box cut across its longer side, where blocks of a file begin as a rule."""
    axis = box.extent.index(max(box.extent))
    low, high = box.lo[axis], box.hi[axis]
    middle = low + -(-(high - low) // (2 * SIDE)) * SIDE
    return [box.replace(axis, low, middle), box.replace(axis, middle, high)]


@dataclass(frozen=True, eq=False)
class Painted:
    """A region in pixels of the image, and the value that its pixels get."""

    edges: Edges
    bounds: tuple[float, float, float, float]
    value: int

    def meets(self, box: Box) -> bool:
        """True where the rectangle about the region and the box overlap."""
        left, top, right, bottom = self.bounds
        return bool(left < box.hi[1] and right > box.lo[1] and top < box.hi[0] and bottom > box.lo[0])


class DrawnSource(TileSource):
    """A `TileSource` (1, 1, height, width) of bytes: the place of each pixel's class, or `IGNORED`.

    It holds corners and no pixels. A pixel belongs to the topmost region that holds its centre.
    """

    dtype = torch.uint8

    def __init__(self, regions: Sequence[Painted], ground: int, size: tuple[int, int]) -> None:
        """Keep the regions, from the lowest to the topmost, what is beneath them, and the image's height and width."""
        self.shape = (1, 1, *size)
        self.ground = ground
        self._regions = list(regions)

    @staticmethod
    def of(
        regions: Sequence[Region], legend: Legend, place: SlideTransform, size: tuple[int, int], path: Path
    ) -> DrawnSource:
        """The map of an image that lies so in the slide; the path is that of the regions, for what is said of them."""
        painted = []
        for region, value in legend.painted(regions, path):
            moved = Region(region.name, tuple(place.to_image(ring) for ring in region.rings))
            painted.append(Painted(edges_of(moved.rings), moved.bounds, value))
        return DrawnSource(painted, legend.ground, size)

    def read(self, box: Box) -> Tensor:
        values = np.full(box.extent, self.ground, np.uint8)
        for region in self._regions:
            if region.meets(box):
                values[fill(region.edges, box.lo, box.hi)] = region.value
        return torch.from_numpy(values)[None, None]

    def constant(self, box: Box) -> Tensor | None:
        value = self.ground
        corner = Box(box.lo, (box.lo[0] + 1, box.lo[1] + 1))
        for region in self._regions:
            if not region.meets(box):
                continue
            if touches(region.edges, box):
                return None
            if fill(region.edges, corner.lo, corner.hi).all():
                value = region.value
        return torch.full((1,), value, dtype=self.dtype)


UNKNOWN = -1
NEAR = 0.02
"""Distance from a whole number that the ratio of slide to label may have: sides are rounded where slides are shrunk."""


@dataclass(frozen=True)
class Labels:
    """An array of labels, (height, width), and the file that it is read from."""

    array: Any
    file: BinaryIO | None = None

    def close(self) -> None:
        """Close the file; what is left of tifffile's objects would keep it open until Python collects them."""
        if self.file is not None:
            self.file.close()


def open_labels(path: Path) -> Labels:
    """The labels of an image, of which nothing is read yet."""
    labels = _opened(path)
    try:
        _check(path, labels.array)
    except RegionsError:
        labels.close()
        raise
    return labels


def _opened(path: Path) -> Labels:
    try:
        return Labels(_finest(path)) if path.is_dir() else _of_tiff(path)
    except Unreadable as error:
        raise RegionsError(path, f"is no label image: {error.reason}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, tifffile.TiffFileError) as error:
        raise RegionsError(path, f"is no label image: {error}") from error


def _check(path: Path, array: Any) -> None:
    if len(array.shape) != 2:
        raise RegionsError(path, f"has the shape {tuple(array.shape)}; a label image has a height and a width only")
    if 0 in array.shape:
        raise RegionsError(path, f"has {array.shape[0]} x {array.shape[1]} labels, which is nothing")
    if array.dtype not in (np.dtype("uint8"), np.dtype("uint16"), np.dtype("bool")):
        raise RegionsError(path, f"holds {array.dtype}; a label image holds uint8 or uint16")


def _finest(path: Path) -> Any:
    """Level 0 of an OME-Zarr label, or an array by itself."""
    node = open_zarr(path)
    if not isinstance(node, zarr.Array):
        attributes: Any = dict(node.attrs)
        said = attributes.get("ome", attributes)  # version 0.4 writes them one level higher
        return member(path, node, said["multiscales"][0]["datasets"][0]["path"])
    return checked_array(path, node)


def _of_tiff(path: Path) -> Labels:
    """The first level of a TIFF; tiles are decoded as they are asked for."""
    file = open_file(path)
    try:
        page: Any = open_tiff(path, file, "labels").series[0].levels[0]
        check_pages(path, (page.keyframe,))
        _check_counts(path, np.asarray(page.keyframe.databytecounts), os.fstat(file.fileno()).st_size)
        return Labels(zarr.open(page.aszarr(), mode="r"), file)
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
        self, labels: Labels, table: NDArray[np.int16], path: Path, shape: Sequence[int], cut: NDArray[Any]
    ) -> None:
        """Keep the array, the value of each label, and where the image lies: rows (y and x) of corner and scale."""
        self.shape = (1, 1, *shape)
        self.path = path
        self._labels: Labels | None = labels
        self._ends = labels.array.shape
        self._table, self._cut = table, cut

    @staticmethod
    def of(
        labels: Labels, legend: Legend, size: tuple[int, int], place: SlideTransform | None, path: Path
    ) -> LabelSource:
        """The map of an image of this size. Without a place the labels cover that image, else its slide."""
        place = place or SlideTransform(size)
        if place.origin != (0.0, 0.0):
            raise RegionsError(
                path, "is a label image of a slide that was cropped; use outlines, or convert without --crop"
            )
        factors = []
        for side, label, scale in zip(size, labels.array.shape, place.scale):
            ratio = side * scale / label
            whole = max(round(ratio), 1) if ratio > 1 - NEAR else 1 / max(round(1 / ratio), 1)
            if abs(ratio / whole - 1) > NEAR:
                slide = (size[0] * place.scale[0], size[1] * place.scale[1])
                raise RegionsError(
                    path,
                    f"has {labels.array.shape[0]} x {labels.array.shape[1]} labels and the slide about "
                    f"{slide[0]:.0f} x {slide[1]:.0f} pixels; a label image is as large as its slide, or a "
                    "whole number of times less",
                )
            factors.append(scale / whole)
        return LabelSource(labels, _table(legend, path), path, size, np.array(factors))

    def read(self, box: Box) -> Tensor:
        places = [
            np.minimum(((np.arange(lo, hi) + 0.5) * factor).astype(np.int64), end - 1)
            for (lo, hi), factor, end in zip(box.intervals(), self._cut, self._ends)
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
        if self._labels is None:
            self._labels = open_labels(self.path)
        try:
            return np.asarray(self._labels.array[rows, columns])
        except (UserError, MemoryError):
            raise
        except Exception as error:  # each codec raises its own kind
            raise RegionsError(self.path, f"cannot be decoded ({type(error).__name__}: {error})") from error

    def constant(self, box: Box) -> Tensor | None:
        return None

    def close(self) -> None:
        if self._labels is not None:
            self._labels.close()
        self._labels = None


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


LABELS = (".tif", ".tiff", ".zarr")
"""Endings of label images. A label within a store is a folder, which may have any name."""


def open_target(
    path: Path | None, legend: Legend, slide: Path, size: tuple[int, int], place: SlideTransform
) -> TileSource:
    """The map of classes of a slide's image, to be read box by box.

    Args:
        path: Outlines or a label image; None where nothing was drawn.
        legend: Class of each name.
        slide: The slide or the store.
        size: Height and width of the image of it.
        place: Position of that image in the slide.
    """
    if path is None:
        return DrawnSource([], legend.ground, size)
    if path.suffix.lower() in LABELS or path.is_dir():
        inside = path.resolve().is_relative_to(slide.resolve())  # a label of the store itself
        return LabelSource.of(open_labels(path), legend, size, None if inside else place, path)
    regions = read_regions(path)
    check_on_slide(regions, place.shape, path)
    return DrawnSource.of(regions, legend, place, size, path)
