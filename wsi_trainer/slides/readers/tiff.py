"""Tiled TIFF, BigTIFF, OME-TIFF and SVS through tifffile: the fast path.

Segments are read by position and decoded without a lock or a shared file offset, so threads and forked
processes do not disturb each other. tifffile knows whether a JPEG is stored as RGB or as YCbCr.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from ..errors import SlideError, UnsupportedSlide
from .closing import Closing
from .jpeg import JpegTiles
from .protocol import Level, Pixels, SlideInfo, clip_box, level_downsample

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

# JPEG 2000 of Aperio is left to OpenSlide: tifffile returns its YCbCr variant unconverted.
_CODECS = {1, 5, 7, 8, 32946, 34712, 50000, 50001, 50002, 34926, 34927}
_RGB, _YCBCR, _GREY = 2, 6, 1
_MICROMETRES = {"m": 1e6, "dm": 1e5, "cm": 1e4, "mm": 1e3, "µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3}
_LARGEST_STRIP = 64 << 20


def claims(path: Path, head: bytes) -> bool:
    """Whether the first bytes are those of a TIFF."""
    return path.is_file() and head[:4] in MAGIC


class TiffReader(Closing):
    """A tiled TIFF whose pixels are 8-bit RGB or grey."""

    name = "tifffile"

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._open()

    def _open(self) -> None:
        # Opened without its name: tifffile would take a file that is called .ndpi for one.
        self._file = self._path.open("rb")
        try:
            self._tif = tifffile.TiffFile(self._file, name="slide")
            series = self._tif.series[0]
        except (tifffile.TiffFileError, OSError, IndexError, ValueError, KeyError) as error:
            self._file.close()
            raise SlideError(self._path, f"broken TIFF: {error}") from error
        self._pages = [_single_page(self._path, level) for level in series.levels]
        base = _shape(self._pages[0])
        self._pages = [page for page in self._pages if _same_aspect(base, _shape(page))]
        levels = tuple(
            Level(height, width, level_downsample(base, height, width)) for height, width in map(_shape, self._pages)
        )
        self._jpegs = [JpegTiles(page) if JpegTiles.suits(page) else None for page in self._pages]
        self._sparse = [0 in page.databytecounts for page in self._pages]
        self._fd = os.open(self._path, os.O_RDONLY)
        self._size = os.fstat(self._fd).st_size
        page = self._pages[0]
        self.info = SlideInfo(
            levels=levels,
            mpp=_resolution(self._tif),
            power=_power(self._tif),
            reader=f"tifffile {tifffile.__version__}",
            vendor="ome-tiff" if self._tif.is_ome else "aperio" if self._tif.is_svs else "tiff",
            associated=tuple(s.name for s in self._tif.series[1:] if s.name),
            details={"compression": str(page.compression.name), "tile": "x".join(map(str, page.chunks[:2]))},
        )

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        out = np.empty((height, width, 3), np.uint8)
        self._fill(level, y, x, out)
        return out

    def read_planes(self, level: int, y: int, x: int, out: Pixels) -> None:
        self._fill(level, y, x, out.transpose(1, 2, 0))

    def _fill(self, level: int, y: int, x: int, out: Pixels) -> None:
        """Decodes into an array (y, x, channel) of any strides."""
        if not 0 <= level < len(self._pages):
            raise IndexError(f"level {level} of {self._path}: it has {len(self._pages)}")
        height, width = out.shape[:2]
        top, left, bottom, right = clip_box(y, x, height, width, self.info.levels[level])
        page = self._pages[level]
        # Painting the background costs as much as copying the pixels: only where some of it may be seen.
        if (bottom - top, right - left) != (height, width) or self._sparse[level]:
            out[...] = self.info.background
        if bottom <= top or right <= left:
            return
        planes = page.shaped[0]  # separately stored samples
        rows, columns = page.chunks[-3:-1] if page.shaped[-1] > 1 else page.chunks[-2:]
        size = _shape(page)
        across, down = -(-size[1] // columns), -(-size[0] // rows)
        for row in range(top // rows, (bottom - 1) // rows + 1):
            for column in range(left // columns, (right - 1) // columns + 1):
                for plane in range(planes):
                    segment = self._segment(level, (plane * down + row) * across + column)
                    if segment is not None:
                        # Tiles at the border reach beyond the image.
                        segment = segment[: size[0] - row * rows, : size[1] - column * columns]
                        channel = plane if planes > 1 else None
                        _paste(out, segment, row * rows - y, column * columns - x, channel)

    def _segment(self, level: int, index: int) -> Pixels | None:
        page, jpeg = self._pages[level], self._jpegs[level]
        offset, count = page.dataoffsets[index], page.databytecounts[index]
        if count == 0:
            return None  # sparse: never written
        data = os.pread(self._fd, count, offset)
        if len(data) < count:
            raise SlideError(
                self._path,
                f"the file ends early: tile {index} should lie at byte {offset} to {offset + count}, "
                f"the file has {self._size} bytes; copy it again",
            )
        key = page.keyframe
        tables = {}
        if key.compression == 7:
            tables = {"jpegtables": page.jpegtables, "jpegheader": key.jpegheader}
        try:
            if jpeg is not None and (pixels := jpeg.decode(data)) is not None:
                return pixels
            segment, _, shape = key.decode(data, index, **tables)
        except Exception as error:  # each codec raises its own kind
            raise SlideError(self._path, f"tile {index} at byte {offset} cannot be decoded: {error}") from error
        return None if segment is None else segment[0, : shape[1], : shape[2]]

    def associated(self, name: str) -> Pixels:
        for series in self._tif.series[1:]:
            if series.name == name:
                return np.ascontiguousarray(series.asarray()[..., :3])
        raise SlideError(self._path, f"no associated image {name!r}; it has {list(self.info.associated)}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._tif.close()
            self._file.close()

    def __reduce__(self) -> tuple[type[TiffReader], tuple[Path]]:
        return TiffReader, (self._path,)


def _shape(page: Any) -> tuple[int, int]:
    """Height and width, however the samples are stored."""
    return page.imagelength, page.imagewidth


def _paste(out: Pixels, segment: Pixels, y: int, x: int, channel: int | None) -> None:
    """Copies a segment whose corner lies at (y, x) of the output, as far as it reaches into it."""
    top, left = max(y, 0), max(x, 0)
    bottom, right = min(y + segment.shape[0], out.shape[0]), min(x + segment.shape[1], out.shape[1])
    part = segment[top - y : bottom - y, left - x : right - x]
    if channel is None and out.strides[2] != 1:  # planes: one by one is twice as fast as at once
        for plane in range(3):
            out[top:bottom, left:right, plane] = part[..., plane if part.shape[2] > 1 else 0]
    elif channel is None and part.shape[2] == 3:
        out[top:bottom, left:right] = part  # row by row; with a cut of the channels it would be pixel by pixel
    elif channel is None:
        out[top:bottom, left:right] = part[..., :3]  # one sample spreads over three, a fourth is dropped
    else:
        out[top:bottom, left:right, channel] = part[..., 0]


def _same_aspect(base: tuple[int, int], shape: tuple[int, int]) -> bool:
    ratio = base[0] / shape[0], base[1] / shape[1]
    return abs(ratio[0] - ratio[1]) <= max(0.02 * ratio[0], 2 * ratio[0] / min(shape))


def _single_page(path: Path, level: Any) -> Any:
    """The one page of a level, or the reason why it is not an image that this reader knows."""
    pages = [page for page in level.pages if page is not None]
    if len(pages) != 1:
        raise UnsupportedSlide(path, f"a stack of {len(pages)} planes (axes {level.axes}); expected one flat image")
    page = pages[0]
    samples = page.shaped[0] * page.shaped[-1]
    if page.dtype != np.uint8:
        raise UnsupportedSlide(path, f"pixels are {page.dtype}; expected 8 bits a channel")
    if samples not in (1, 3, 4) or page.shaped[1] != 1:
        raise UnsupportedSlide(path, f"{samples} channels in shape {page.shape}; expected RGB or grey")
    if page.compression not in _CODECS:
        raise UnsupportedSlide(path, f"compression {page.compression.name} is not read through tifffile")
    if page.photometric not in (_RGB, _GREY) and not (page.photometric == _YCBCR and page.compression == 7):
        raise UnsupportedSlide(path, f"colours are stored as {page.photometric.name}; expected RGB")
    if not page.is_tiled and int(np.prod(page.chunks)) > _LARGEST_STRIP:
        raise UnsupportedSlide(path, f"not tiled: strips of {page.chunks} would be decoded whole")
    return page


def _description(tif: tifffile.TiffFile) -> str:
    text = tif.pages.first.description
    return text if isinstance(text, str) else ""


def _resolution(tif: tifffile.TiffFile) -> tuple[float, float] | None:
    if tif.is_svs:
        found = re.search(r"\bMPP\s*=\s*([0-9.eE+-]+)", _description(tif))
        return (float(found[1]), float(found[1])) if found else None
    if tif.is_ome:
        return _ome_resolution(tif.ome_metadata or "")
    page = tif.pages.first
    unit = {2: 25400.0, 3: 10000.0}.get(int(page.resolutionunit))
    x, y = page.resolution
    return (unit / y, unit / x) if unit and x > 0 and y > 0 else None


def _ome_resolution(xml: str) -> tuple[float, float] | None:
    for element in ElementTree.fromstring(xml).iter():
        if element.tag.endswith("}Pixels") and "PhysicalSizeX" in element.attrib:
            sizes = []
            for axis in "YX":
                unit = _MICROMETRES.get(element.get(f"PhysicalSize{axis}Unit", "µm"))
                value = element.get(f"PhysicalSize{axis}")
                if unit is None or value is None:
                    return None
                sizes.append(float(value) * unit)
            return sizes[0], sizes[1]
    return None


def _power(tif: tifffile.TiffFile) -> float | None:
    if tif.is_svs:
        found = re.search(r"\bAppMag\s*=\s*([0-9.]+)", _description(tif))
    else:
        found = re.search(r'NominalMagnification="([0-9.]+)"', tif.ome_metadata or "") if tif.is_ome else None
    return float(found[1]) if found else None
