"""`Slide`: an open slide of any format, upright and in one set of coordinates; `ScaledImage`: the same, coarser."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from PIL import Image

from wsi_trainer.errors import UnknownResolution
from wsi_trainer.io.arrays import open_zarr_array
from wsi_trainer.slide.formats import open_format
from wsi_trainer.slide.formats.base import (
    PLAIN,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    SlideInfo,
    blank,
    check_decoded,
    to_planes,
)
from wsi_trainer.slide.formats.store import StoreReader
from wsi_trainer.slide.geometry import TOLERANCE, Pair, Resolution, SlideTransform, factors_to, resolve
from wsi_trainer.slide.tissue import LABEL, TissueMask, find_tissue, mask_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from wsi_trainer.fit.predictor import Attention

_COARSEST = 64.0  # downsample up to which the levels of a cropped slide stay pixel for pixel those of the slide
_HELD = 1 << 22  # pixels that are read at a time to make a thumbnail
LONGEST = 1024
"""Longest side of a picture of a slide."""

# By TIFF's number of an orientation: whether rows and columns are exchanged, and then which axes run backwards.
_TURNS = {
    1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
    5: (True, False, False), 6: (True, False, True), 7: (True, True, True), 8: (True, True, False),
}  # fmt: skip


class Slide:
    """A slide: its levels, their pixels, its place, its tissue, a thumbnail. Use it as a context manager.

    It may be read by several threads, sent to other processes and used after a fork. A slide that is read after it was
    closed opens its file again, and one that nobody holds any more closes it.

    Attributes:
        path: The file, the folder of a DICOM series or the store.
        name: Name of the slide in errors.
        info: Facts from the file, upright, and of the cropped part where it is cropped.
        whole: Facts of the whole slide.
        origin: Begin of level 0 in that of the whole slide, y and x.
    """

    path: Path
    name: str
    _format: str | None
    _options: ReadOptions
    _mpp: float | None
    _said_by: str
    _cropped: bool

    def _begin_anew(self) -> None:
        """Sets all that no other process can use: a fork shares open files, their positions and their locks."""
        self._opened: Reader | None = None
        self._closing: weakref.finalize | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("path", "name", "_format", "_options", "_mpp", "_said_by", "_cropped")
        return {key: self.__dict__[key] for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew()

    @classmethod
    def open(
        cls, path: Path | str, reader: str | None = None, options: ReadOptions = PLAIN, *, mpp: float | None = None,
        said_by: Literal["manifest", "explicit"] = "manifest", crop: bool = False, name: str | None = None,
    ) -> Self:  # fmt: skip
        """Opens a slide.

        Args:
            path: A file, a DICOM folder or an OME-Zarr store.
            reader: The name of a reader, to ask this one only: store, omezarr, tiff, openslide, dicom or picture.
            options: Channel and range of a slide that is more than one image of 8 bits.
            mpp: Micrometres per pixel, where the file does not say it or says it wrong.
            said_by: Who gives them. A manifest means the slide's file: a store of this package has what `preprocess`
                settled, and only an explicit number changes that.
            crop: Read only the part that was scanned, where the file says which that is.
            name: Name of the slide in errors, instead of its path.

        Raises:
            SlideError: It cannot be read; the message gives the reason of each reader that was asked.
        """
        slide = cls()
        slide.path, slide.name = Path(path), name or str(path)
        slide._format, slide._options, slide._cropped = reader, options, crop
        slide._mpp, slide._said_by = mpp, said_by
        slide._begin_anew()
        try:
            _ = slide.info
        except BaseException:
            slide.close()
            raise
        return slide

    def close(self) -> None:
        """Closes the file."""
        if self._process != os.getpid():
            self._begin_anew()
        with self._lock:
            if self._closing is not None:
                self._closing()
            self._opened = self._closing = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _reader(self) -> Reader:
        if self._process != os.getpid():
            self._begin_anew()
        opened = self._opened
        if opened is None:
            with self._lock:
                if self._opened is None:
                    self._opened = open_format(self.path, self._format, self._options)
                    self._closing = weakref.finalize(self, _close, self._opened, os.getpid())
                opened = self._opened
        return opened

    # -- what it is

    @cached_property
    def _turn(self) -> tuple[bool, bool, bool]:
        return _TURNS[self._reader.orientation]

    @cached_property
    def whole(self) -> SlideInfo:
        info = self._reader.info
        if not self._turn[0]:
            return info
        details = dict(info.details)
        if "tile" in details:
            details["tile"] = "x".join(reversed(details["tile"].split("x")))
        levels = tuple(Level(level.width, level.height, level.downsample) for level in info.levels)
        return replace(
            info, levels=levels, mpp=None if info.mpp is None else (info.mpp[1], info.mpp[0]), details=details
        )

    @cached_property
    def _crop(self) -> _Crop | None:
        bounds, whole = self.whole.bounds, self.whole
        if not self._cropped or bounds is None or min(bounds[2:]) < 1 or bounds == (0, 0, *whole.shape):
            return None
        return _Crop(whole, bounds)

    @cached_property
    def info(self) -> SlideInfo:
        return self.whole if self._crop is None else self._crop.info

    @property
    def origin(self) -> tuple[int, int]:
        return (0, 0) if self._crop is None else self._crop.origin

    @property
    def levels(self) -> tuple[Level, ...]:
        """Its resolutions, finest first."""
        return self.info.levels

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of level 0."""
        return self.info.shape

    @cached_property
    def stored(self) -> bool:
        """True if it is a store that this package wrote."""
        return isinstance(self._reader, StoreReader)

    @cached_property
    def resolution(self) -> Resolution | None:
        """The size of a pixel of level 0 and where it comes from; None where nothing plausible says it."""
        try:
            return self.need_resolution()
        except UnknownResolution:
            return None

    def need_resolution(self) -> Resolution:
        """The size of a pixel of level 0 and where it comes from.

        Raises:
            UnknownResolution: Nothing plausible says it.
        """
        if self.stored and self.info.mpp is not None and (self._mpp is None or self._said_by == "manifest"):
            return Resolution(*self.info.mpp, "store")
        return resolve(self.path, self.info, self._mpp, self._said_by)

    @cached_property
    def painted(self) -> bool:
        """True for a store whose background `preprocess` painted white."""
        return isinstance(self._reader, StoreReader) and self._reader.painted

    @cached_property
    def transform(self) -> SlideTransform:
        """The place of level 0 in the slide that it was made from."""
        if isinstance(self._reader, StoreReader):
            return self._reader.place
        y, x = self.origin
        own = self.resolution
        mpp = None if own is None else (own.y, own.x)
        return SlideTransform(self.whole.shape, (float(y), float(x)), mpp=mpp, bounds=self.whole.bounds)

    def factors(self, mpp: float) -> Pair:
        """Pixels of level 0, y and x, along one pixel of a resolution, which is square.

        Raises:
            AbsentResolution: It is finer than the slide.
            UnknownResolution: Nothing says how large the slide's pixels are.
        """
        own = self.need_resolution()
        if self.stored and own.is_square:  # a level that preprocess made is taken as it is
            for level in self.levels:
                if abs(mpp / (own.mean * level.downsample) - 1) <= TOLERANCE:
                    return level.downsample, level.downsample
        return factors_to(self.path, own, mpp)

    def factors_from(self, mpp: float | None) -> Pair:
        """The same where the slide is finer than the resolution; 1 where it is not, or nobody knows one of the two."""
        own = self.resolution
        return (1.0, 1.0) if mpp is None or own is None or own.mean >= mpp else self.factors(mpp)

    # -- pixels

    @property
    def block(self) -> int:
        """Pixels along a side of the blocks in which it is best read."""
        return self._reader.block

    @property
    def planar(self) -> bool:
        """True if its decoder makes the bytes of a channel side by side."""
        return self._reader.planar and self._reader.orientation == 1

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        """The pixels of a box in coordinates of its level; outside, and where not scanned, the background."""
        level, y, x = self._uncropped(level, y, x)
        exchanged, bottom_up, right_left = self._turn
        if self._reader.orientation == 1:
            return self._reader.read(level, y, x, height, width)
        size = self.whole.levels[level]
        top = size.height - y - height if bottom_up else y
        left = size.width - x - width if right_left else x
        if exchanged:
            pixels = self._reader.read(level, left, top, width, height).transpose(1, 0, 2)
        else:
            pixels = self._reader.read(level, top, left, height, width)
        return np.ascontiguousarray(pixels[:: -1 if bottom_up else 1, :: -1 if right_left else 1])

    def read_into(self, level: int, y: int, x: int, out: Pixels) -> None:
        """Fills an array (colour, y, x), of any strides, with the pixels whose corner is (y, x)."""
        if self._reader.orientation == 1:
            level, y, x = self._uncropped(level, y, x)
            self._reader.read_into(level, y, x, out)
        else:
            to_planes(self.read(level, y, x, *out.shape[1:]), out)

    def empty(self, level: int, y: int, x: int, height: int, width: int) -> bool:
        """True if a box inside the level is known, without reading, to be white."""
        return self._reader.orientation == 1 and self._reader.empty(*self._uncropped(level, y, x), height, width)

    def associated(self, name: str) -> Pixels:
        """An associated image, by a name in `info.associated`. Ask for it only where a person wants it."""
        return self._reader.associated(name)

    def _uncropped(self, level: int, y: int, x: int) -> tuple[int, int, int]:
        return (level, y, x) if self._crop is None else self._crop.outside(level, y, x)

    # -- what a notebook shows

    def __repr__(self) -> str:
        from wsi_trainer.notebook import SlideCard

        return SlideCard(self).text

    def _repr_html_(self) -> str:
        from wsi_trainer.notebook import SlideCard

        return SlideCard(self).html

    def plot(
        self, axes: Axes | None = None, *, tissue: bool = False, attention: Attention | None = None,
        side: int = LONGEST,
    ) -> Axes:  # fmt: skip
        """Draws the slide with a scale bar, on axes in pixels of level 0 of the original slide.

        Args:
            axes: Axes of matplotlib; by default those of a new figure.
            tissue: Whether to outline the tissue.
            attention: What `Run.attention` found on the slide, to be drawn in the colours of heat maps.
            side: Longest side of the picture in pixels.
        """
        from wsi_trainer.notebook import plot

        return plot(self, axes, tissue, attention, side)

    # -- what is made of them

    def thumbnail(self, side: int) -> Pixels:
        """The slide shrunk by the smallest whole factor that keeps within `side` pixels.

        Means over the coarsest level that has at least `side` pixels, read box by box; at the right and at the bottom
        they are over what is there.
        """
        fits = [number for number, level in enumerate(self.levels) if max(level.height, level.width) >= side]
        number = max(fits, key=lambda number: self.levels[number].downsample, default=0)
        level = self.levels[number]
        factor = max(1, -(-max(level.height, level.width) // side))
        out = np.empty((-(-level.height // factor), -(-level.width // factor), 3), np.uint8)
        columns = max(1, min(out.shape[1], _HELD // factor**2))
        rows = max(1, _HELD // (factor**2 * columns))
        for row in range(0, out.shape[0], rows):
            for column in range(0, out.shape[1], columns):
                top, left = row * factor, column * factor
                height, width = min(rows * factor, level.height - top), min(columns * factor, level.width - left)
                pixels = self.read(number, top, left, height, width)
                out[row : row + rows, column : column + columns] = np.asarray(Image.fromarray(pixels).reduce(factor))
        return out

    def coarse_copy(self, image: ScaledImage, scale: int) -> CoarseCopy:
        """A copy in which a pixel is `scale` pixels of an image of the slide."""
        factors = (scale * self.shape[0] / image.shape[0], scale * self.shape[1] / image.shape[1])
        if abs(factors[0] / factors[1] - 1) < TOLERANCE:  # but for rounding, one for both
            factors = (factors[0], factors[0])
        finer = 1  # the slide is read once, fine enough for both
        longest = max(self.shape[0] / factors[0], self.shape[1] / factors[1])
        while finer < scale and longest * finer < LONGEST:
            finer *= 2
        coarse = ScaledImage(self, (max(1.0, factors[0] / finer), max(1.0, factors[1] / finer)), smooth=False)
        what = f"its overview of {coarse.shape[1]} x {coarse.shape[0]} px"
        check_decoded(self.path, what, 3 * math.prod(coarse.shape))
        picture = Image.fromarray(coarse.read(0, 0, *coarse.shape))
        return CoarseCopy(np.asarray(picture.reduce(finer)), factors, picture)

    def tissue(self, image: ScaledImage | None = None) -> TissueMask:
        """The tissue: what `preprocess` stored with a store, or would store by Otsu's method.

        Args:
            image: The slide at the resolution whose pixels the mask counts in; by default level 0.
        """
        image = image or ScaledImage(self, 1.0)
        own = self.resolution
        scale = mask_scale(None if own is None else own.coarser(*image.scale), image.shape)
        mask = self._stored_tissue(image, scale)
        if mask is not None:
            return mask
        return find_tissue(self.coarse_copy(image, scale).pixels, scale)

    def _stored_tissue(self, image: ScaledImage, scale: int) -> TissueMask | None:
        """The label of a store at the level whose pixels are those of the mask, or the coarsest below."""
        folder = self.path / "labels" / LABEL
        if not (folder / "zarr.json").is_file():
            return None
        levels = sorted(int(level.name) for level in folder.iterdir() if level.name.isdigit())
        shrink = round(image.scale[0])
        for level in reversed(levels):
            if abs(image.scale[0] / shrink - 1) < 1e-4 and 2**level % shrink == 0 and 2**level // shrink <= scale:
                array = open_zarr_array(folder / str(level))
                return TissueMask(np.asarray(array[:]) > 0, 2**level // shrink)
        return None


class _Crop:
    """The scanned part of a slide whose canvas is larger, as MRXS has it.

    The corner is moved outwards to a whole pixel of the coarser levels, so that every level is cut and none is
    filtered; levels for which that would keep too much are left out.
    """

    def __init__(self, whole: SlideInfo, bounds: Sequence[int]) -> None:
        kept = [i for i, level in enumerate(whole.levels) if level.downsample <= _COARSEST]
        self._levels = [i for i in kept if whole.levels[i].downsample.is_integer()]
        self._steps = [int(whole.levels[i].downsample) for i in self._levels]
        step = math.lcm(*self._steps)
        y, x, height, width = bounds
        self.origin = (max(0, y) // step * step, max(0, x) // step * step)
        bottom, right = min(y + height, whole.shape[0]), min(x + width, whole.shape[1])
        size = (max(1, bottom - self.origin[0]), max(1, right - self.origin[1]))
        levels = tuple(Level(math.ceil(size[0] / d), math.ceil(size[1] / d), float(d)) for d in self._steps)
        self.info = replace(whole, levels=levels, bounds=(0, 0, *size))

    def outside(self, level: int, y: int, x: int) -> tuple[int, int, int]:
        """A level and a position on it, as the slide counts them."""
        step = self._steps[level]
        return self._levels[level], y + self.origin[0] // step, x + self.origin[1] // step


def _close(reader: Reader, process: int) -> None:
    """Closes a file in the process that opened it: a library's threads and locks do not survive a fork."""
    if process == os.getpid():
        reader.close()


@dataclass(frozen=True, eq=False)
class CoarseCopy:
    """A slide as coarse as its mask."""

    pixels: Pixels
    factors: tuple[float, float]
    """Pixels of level 0, y and x, along one of them."""
    picture: Image.Image
    """The slide in at least `LONGEST` pixels, where it has as many."""


_SUPPORT = {Image.Resampling.LANCZOS: 3.0, Image.Resampling.BOX: 0.5}
_LARGEST_SOURCE = 4096  # px a side of a source block


class ScaledImage:
    """A slide in which one pixel is `factor` pixels of level 0, 1 or more: the same for both axes, or y and x.

    It is read box by box, with nothing held whole. The coarsest level that is at least as fine as wanted is filtered
    down with Lanczos (averaged, for overviews). A box is computed with the margin that the filter needs, so it does not
    depend on how the image is cut.
    """

    def __init__(self, slide: Slide, factor: float | Pair, *, smooth: bool = True) -> None:
        factors = factor if isinstance(factor, tuple) else (factor, factor)
        if min(factors) < 1:
            raise ValueError(f"factor={factor}: making a slide finer would invent pixels")
        self._slide = slide
        levels = slide.levels
        fits = [i for i, level in enumerate(levels) if level.downsample <= min(factors) * 1.0001]
        self.level = max(fits, key=lambda i: levels[i].downsample)
        steps = [factor / levels[self.level].downsample for factor in factors]
        self._steps = tuple(1.0 if abs(step - 1) < 1e-4 else step for step in steps)
        largest = max(self._steps)
        # Always filtered in the same cells, so that rounding does not depend on what is read at a time.
        self._cell = max(1, min(256, int(_LARGEST_SOURCE / largest)))
        self._size = self._cell * max(1, int(_LARGEST_SOURCE / largest / self._cell))
        self._filter = Image.Resampling.LANCZOS if smooth else Image.Resampling.BOX
        height, width = slide.shape
        self.shape = (max(1, round(height / factors[0])), max(1, round(width / factors[1])))
        if self.is_exact:
            self.shape = (levels[self.level].height, levels[self.level].width)

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of level 0, y and x, along one pixel: the factor, or what a level has that is taken as it is."""
        step = self._slide.levels[self.level].downsample
        return step * self._steps[0], step * self._steps[1]

    @property
    def is_exact(self) -> bool:
        """True if pixels are those of a level of the slide, unfiltered."""
        return self._steps == (1.0, 1.0)

    def read(self, y: int, x: int, height: int, width: int) -> Pixels:
        """The pixels of a box; outside the slide is background."""
        if self.is_exact:
            return self._slide.read(self.level, y, x, height, width)
        out = blank(height, width, self._slide.info.background)
        top, left = max(y, 0), max(x, 0)
        bottom, right = min(y + height, self.shape[0]), min(x + width, self.shape[1])
        for row in range(top // self._size * self._size, bottom, self._size):
            for column in range(left // self._size * self._size, right, self._size):
                part = (
                    max(row, top),
                    max(column, left),
                    min(row + self._size, bottom),
                    min(column + self._size, right),
                )
                out[part[0] - y : part[2] - y, part[1] - x : part[3] - x] = self._area(*part)
        return out

    def read_into(self, y: int, x: int, out: Pixels) -> None:
        """Fills an array (c, y, x) with the pixels whose corner is (y, x)."""
        if self.is_exact:
            self._slide.read_into(self.level, y, x, out)
        else:
            to_planes(self.read(y, x, *out.shape[1:]), out)

    def empty(self, y: int, x: int, height: int, width: int) -> bool:
        """True if a box inside the image is known, without reading, to be white."""
        if self.is_exact:
            return self._slide.empty(self.level, y, x, height, width)
        cell = self._cell
        top, left, *_ = self._source_of(y // cell * cell, x // cell * cell)
        *_, bottom, right = self._source_of((y + height - 1) // cell * cell, (x + width - 1) // cell * cell)
        level = self._slide.levels[self.level]
        bottom, right = min(bottom, level.height), min(right, level.width)
        return self._slide.empty(self.level, top, left, bottom - top, right - left)

    def _area(self, top: int, left: int, bottom: int, right: int) -> Pixels:
        """A part of the result whose source is read at once and filtered cell by cell."""
        cell = self._cell
        rows = range(top // cell * cell, bottom, cell)
        columns = range(left // cell * cell, right, cell)
        first = self._source_of(rows[0], columns[0])
        last = self._source_of(rows[-1], columns[-1])
        source = self._read_continued(first[0], first[1], last[2] - first[0], last[3] - first[1])
        out = np.empty((bottom - top, right - left, 3), np.uint8)
        for row in rows:
            for column in columns:
                y0, x0, y1, x1 = self._source_of(row, column)
                piece = source[y0 - first[0] : y1 - first[0], x0 - first[1] : x1 - first[1]]
                pixels = self._filtered(piece, row, column, y0, x0)
                a, b = max(row, top), max(column, left)
                pixels = pixels[a - row : bottom - row, b - column : right - column]
                out[a - top : a - top + pixels.shape[0], b - left : b - left + pixels.shape[1]] = pixels
        return out

    def _source_of(self, row: int, column: int) -> tuple[int, int, int, int]:
        """The part of the level that a cell needs: top, left, bottom, right."""
        level = self._slide.levels[self.level]
        margins = [_SUPPORT[self._filter] * step + 1 for step in self._steps]
        steps = self._steps
        top, bottom = _span(row, self._extent(row, 0), steps[0], margins[0], self._needed(0, level.height))
        left, right = _span(column, self._extent(column, 1), steps[1], margins[1], self._needed(1, level.width))
        return top, left, bottom, right

    def _extent(self, start: int, axis: int) -> int:
        return min(self._cell, self.shape[axis] - start)

    def _read_continued(self, top: int, left: int, height: int, width: int) -> Pixels:
        """Pixels of the level, continued by its border.

        The size of the result is rounded, so its last pixel may reach beyond the slide.
        """
        level = self._slide.levels[self.level]
        inside = (min(height, level.height - top), min(width, level.width - left))
        source = self._slide.read(self.level, top, left, *inside)
        pad = ((0, height - inside[0]), (0, width - inside[1]), (0, 0))
        return np.pad(source, pad, mode="edge") if pad[0][1] or pad[1][1] else source

    def _filtered(self, piece: Pixels, row: int, column: int, top: int, left: int) -> Pixels:
        height, width = self._extent(row, 0), self._extent(column, 1)
        y, x = row * self._steps[0] - top, column * self._steps[1] - left
        # Never beyond the piece by a rounding error.
        ends = (min(x + width * self._steps[1], piece.shape[1]), min(y + height * self._steps[0], piece.shape[0]))
        image = Image.fromarray(np.ascontiguousarray(piece))
        return np.asarray(image.resize((width, height), self._filter, box=(x, y, *ends)))

    def _needed(self, axis: int, size: int) -> int:
        """The number of pixels of the level that the whole result reaches over."""
        return max(size, math.ceil(self.shape[axis] * self._steps[axis] - 1e-6))


def _span(start: int, length: int, step: float, margin: float, size: int) -> tuple[int, int]:
    """The source pixels that an output span needs."""
    low = math.floor(start * step - margin)
    high = math.ceil((start + length) * step + margin)
    return max(0, low), min(size, high)
