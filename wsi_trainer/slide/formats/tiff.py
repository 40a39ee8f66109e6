"""TIFF, BigTIFF, OME-TIFF and SVS through tifffile: the fast path.

Segments are read by position and decoded without a lock or a shared file offset, so threads and forked
processes do not disturb each other. tifffile knows whether a JPEG is stored as RGB or as YCbCr.
"""

from __future__ import annotations

import io
import os
import re
import struct
import threading
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from PIL import Image
from tifffile.tifffile import jpeg_decode_colorspace

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.slide.formats.base import (
    PLAIN,
    READ_ONLY,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    SlideInfo,
    clip_box,
    level_downsample,
    read_at,
)
from wsi_trainer.slide.formats.tiff_pages import (
    check_pages,
    choose,
    contradiction,
    further_images,
    open_tiff,
    orientation,
    pixel_size,
    power,
    tile_size,
)

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_JPEG = 7


def claims(path: Path, head: bytes) -> bool:
    """True if the first bytes are those of a TIFF."""
    return path.is_file() and head[:4] in MAGIC


class TiffReader(Reader):
    """A TIFF whose pixels are RGB or grey, or of which one channel is read.

    Attributes:
        orientation: how the image is turned, as TIFF counts it; it is read as it is stored.
    """

    def __init__(self, path: Path | str, options: ReadOptions = PLAIN) -> None:
        super().__init__(path, options)
        self._fd = -1
        self._file = self._path.open("rb")
        try:
            self._open()
        except (UserError, MemoryError):
            self._file.close()
            raise
        except Exception as error:  # a damaged directory makes tifffile raise whatever it stumbles over
            self._file.close()
            if isinstance(error, OSError) and error.strerror:  # of the system, and nothing about what the file holds
                raise SlideError(self._path, error.strerror) from error
            known = isinstance(error, tifffile.TiffFileError)
            reason = str(error) if known else "its directory holds values that cannot be; copy the file again"
            raise SlideError(self._path, f"broken TIFF: {reason}") from error

    def _open(self) -> None:
        self._size = os.fstat(self._file.fileno()).st_size
        if self._size < 8:
            raise SlideError(self._path, f"broken TIFF: the file ends after {self._size} bytes")
        self._tif = open_tiff(self._path, self._file, "slide")
        if not len(self._tif.pages):
            raise SlideError(self._path, "broken TIFF: there is no image where the header says; copy the file again")
        check_pages(self._path, (self._tif.pages.first,))  # before anything is made of it
        self._choice = choose(self._path, self._tif, self._options)
        pages = self._choice.pages
        check_pages(self._path, pages)
        base = _shape(pages[0])
        self._pages = [page for page in pages if _same_aspect(base, _shape(page))]
        levels = tuple(
            Level(height, width, level_downsample(base, height, width)) for height, width in map(_shape, self._pages)
        )
        plain = self._choice.is_plain
        self._jpegs = [JpegTiles(page) if plain and JpegTiles.suits(page.keyframe) else None for page in self._pages]
        self._sparse = [0 in page.databytecounts for page in self._pages]
        self._tiles = [tile_size(page.keyframe) for page in self._pages]
        self._fd = os.open(self._path, READ_ONLY)
        key, size, others = self._pages[0].keyframe, pixel_size(self._tif), further_images(self._tif)
        self.orientation = orientation(key)
        images = f"the file holds {others} further images, which are not read" if others else ""
        self.info = SlideInfo(
            levels=levels,
            mpp=size.mpp,
            power=power(self._tif),
            reader=f"tifffile {tifffile.__version__}",
            vendor="ome-tiff" if self._tif.is_ome else "aperio" if self._tif.is_svs else "tiff",
            associated=tuple(s.name for s in self._tif.series[1:] if s.name),
            details={"compression": str(key.compression.name), "tile": "x".join(map(str, key.chunks[:2]))},
            changes=self._choice.changes,
            unreadable=size.unreadable,
            notes=tuple(filter(None, (images, contradiction(self._tif, size)))),
        )

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        out = np.empty((height, width, 3), np.uint8)
        self._fill(level, y, x, out)
        return out

    def read_into(self, level: int, y: int, x: int, out: Pixels) -> None:
        self._fill(level, y, x, out.transpose(1, 2, 0))

    def _fill(self, level: int, y: int, x: int, out: Pixels) -> None:
        """Decodes into an array (y, x, channel) of any strides."""
        if not 0 <= level < len(self._pages):
            raise IndexError(f"level {level} of {self._path}: it has {len(self._pages)}")
        height, width = out.shape[:2]
        top, left, bottom, right = clip_box(y, x, height, width, self.info.levels[level])
        # Painting the background costs as much as copying the pixels: only where some of it may be seen.
        if (bottom - top, right - left) != (height, width) or self._sparse[level]:
            out[...] = self.info.background
        if bottom <= top or right <= left:
            return
        rows, columns = self._tiles[level]
        size = _shape(self._pages[level])
        across, down = -(-size[1] // columns), -(-size[0] // rows)
        for row in range(top // rows, (bottom - 1) // rows + 1):
            for column in range(left // columns, (right - 1) // columns + 1):
                tile = self._tile(level, row * across + column, down * across)
                if tile is not None:
                    # Tiles at the border reach beyond the image.
                    tile = tile[: size[0] - row * rows, : size[1] - column * columns]
                    _paste(out, tile, row * rows - y, column * columns - x)

    def _tile(self, level: int, index: int, count: int) -> Pixels | None:
        """The pixels (y, x, 1 or 3) of a tile, of which there are `count`; None if it was never written."""
        planes = self._pages[level].keyframe.shaped[0]
        if planes == 1:
            segment = self._segment(level, index)
        else:  # separately stored samples
            sample = self._choice.sample
            wanted = range(planes) if sample is None else [sample]
            parts = [self._segment(level, plane * count + index) for plane in wanted]
            whole = [part for part in parts if part is not None]
            if len(whole) < len(parts):
                return None
            segment = np.concatenate(whole, axis=2)
            if sample is not None:  # the others were not read
                segment = np.broadcast_to(segment, (*segment.shape[:2], planes))
        if segment is None or self._choice.is_plain:
            return segment
        return self._choice.pixels(self._path, segment)

    def _segment(self, level: int, index: int) -> Any:
        page, jpeg = self._pages[level], self._jpegs[level]
        offset, count = page.dataoffsets[index], page.databytecounts[index]
        if count == 0:
            return None  # sparse: never written
        if not 0 <= offset <= offset + count:  # numbers with a sign, of a damaged directory
            raise SlideError(self._path, f"broken TIFF: tile {index} has {count} bytes at byte {offset}")
        if offset + count > self._size:
            raise SlideError(
                self._path,
                f"the file ends early: tile {index} should lie at byte {offset} to {offset + count}, "
                f"the file has {self._size} bytes; copy it again",
            )
        data = read_at(self._fd, count, offset)
        key = page.keyframe
        tables = {}
        if key.compression == _JPEG:
            tables = {"jpegtables": page.jpegtables, "jpegheader": key.jpegheader}
        try:
            if jpeg is not None and (pixels := jpeg.decode(data)) is not None:
                return pixels
            if (found := inner_size(int(key.compression), data)) is not None:
                self._check_inner(index, found, self._tiles[level])
            segment, _, shape = key.decode(data, index, **tables)
        except SlideError:
            raise
        except Exception as error:  # each codec raises its own kind
            raise SlideError(self._path, f"tile {index} at byte {offset} cannot be decoded: {error}") from error
        return None if segment is None else segment[0, : shape[1], : shape[2]]

    def _check_inner(self, index: int, found: tuple[int, int], expected: tuple[int, int]) -> None:
        """Refuses an encoded image that is larger than the tile it fills: it may ask for any memory."""
        if found[0] > expected[0] or found[1] > expected[1]:
            sizes = [f"{width} x {height} px" for height, width in (found, expected)]
            raise SlideError(self._path, f"tile {index} holds an image of {sizes[0]}, the tile has {sizes[1]}")

    def _associated(self, name: str) -> Pixels:
        series = next(series for series in self._tif.series[1:] if series.name == name)
        check_pages(self._path, (series.pages[0],))
        pixels = series.asarray()[..., :3]
        if pixels.dtype != np.uint8:
            raise SlideError(self._path, f"the associated image {name!r} has pixels of {pixels.dtype}")
        return np.ascontiguousarray(pixels)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._tif.close()
            self._file.close()


def _shape(page: Any) -> tuple[int, int]:
    """Height and width, however the samples are stored."""
    return page.keyframe.imagelength, page.keyframe.imagewidth


def _paste(out: Pixels, segment: Pixels, y: int, x: int) -> None:
    """Copies a segment whose corner lies at (y, x) of the output, as far as it reaches into it."""
    top, left = max(y, 0), max(x, 0)
    bottom, right = min(y + segment.shape[0], out.shape[0]), min(x + segment.shape[1], out.shape[1])
    part = segment[top - y : bottom - y, left - x : right - x]
    if out.strides[2] != 1:  # planes: one by one is twice as fast as at once
        for plane in range(3):
            out[top:bottom, left:right, plane] = part[..., plane if part.shape[2] > 1 else 0]
    else:
        out[top:bottom, left:right] = part  # row by row; one sample spreads over three


def _same_aspect(base: tuple[int, int], shape: tuple[int, int]) -> bool:
    ratio = base[0] / shape[0], base[1] / shape[1]
    return abs(ratio[0] - ratio[1]) <= max(0.02 * ratio[0], 2 * ratio[0] / min(shape))


_kept = threading.local()


def tile_room(shape: tuple[int, ...]) -> Pixels:
    """Memory for a decoded tile, the same at the next call of this thread: JPEG decodes an eighth faster into it."""
    room: Pixels | None = getattr(_kept, "room", None)
    if room is None or room.shape != shape:
        room = _kept.room = np.empty(shape, np.uint8)
    return room


class JpegTiles:
    """Decodes the tiles of one page as tifffile does, without new memory for each."""

    def __init__(self, page: Any) -> None:
        self._tables = page.jpegtables
        self._shape = tuple(map(int, page.chunks))
        self._stored, self._wanted = jpeg_decode_colorspace(
            page.photometric, page.planarconfig, page.extrasamples, page.is_jfif
        )

    @staticmethod
    def suits(page: Any) -> bool:
        """True if the tiles are whole JPEGs of three bytes a pixel."""
        whole = page.is_tiled and page.compression == _JPEG and page.jpegheader is None and page.fillorder == 1
        return bool(whole and page.dtype == np.uint8 and len(page.chunks) == 3 and page.chunks[2] == 3)

    def decode(self, data: bytes) -> Pixels | None:
        """The pixels of a tile, which this thread's next call overwrites; None if it has another size."""
        out = tile_room(self._shape)
        how = {"tables": self._tables, "colorspace": self._stored, "outcolorspace": self._wanted}
        try:
            imagecodecs.jpeg8_decode(data, **how, out=out)
        except ValueError:  # some writers cut the tiles at the border; tifffile fills them up
            return None
        return out


Size = tuple[int, int]
"""Height and width."""


_IMAGES = {7: "JPEG", 34712: "JPEG2000", 50001: "WEBP"}
_JPEG_XL = 50002


def inner_size(compression: int, data: bytes) -> Size | None:
    """The size that an encoded tile declares; None where it is not an image of its own, or declares none."""
    if compression == _JPEG_XL:
        return _jpegxl(data)
    if compression not in _IMAGES:
        return None
    try:
        with Image.open(io.BytesIO(data), formats=(_IMAGES[compression],)) as image:
            return image.height, image.width
    except Image.DecompressionBombError as error:
        found = re.search(r"\((\d+) pixels\)", str(error))
        return (int(found[1]) if found else 1 << 30), 1
    except (OSError, ValueError, SyntaxError, struct.error):
        return None


def _jpegxl(data: bytes) -> Size | None:
    try:  # its header is packed bit by bit; the decoder reads it and says what it would need
        imagecodecs.jpegxl_decode(data, out=np.empty((1, 1, 3), np.uint8))
    except ValueError as error:
        found = re.search(r" shape=\((\d+), (\d+)", str(error))
        return (int(found[1]), int(found[2])) if found else None
    except imagecodecs.JpegxlError:
        return None
    return 1, 1
