"""The base class of readers of slides, and what they share: options, limits, colours, memory."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.untrusted import Limit, too_much

Pixels = NDArray[np.uint8]
"""Height, width, RGB."""

WHITE = (255, 255, 255)
CHANNELS = 3
MICROMETRES = {
    "m": 1e6, "cm": 1e4, "mm": 1e3, "µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "in": 25400.0, "inch": 25400.0,
    "meter": 1e6, "centimeter": 1e4, "millimeter": 1e3, "micrometer": 1.0, "nanometer": 1e-3,
}  # fmt: skip
"""Units of lengths, by their symbols in OME-XML and their names in OME-Zarr."""
PLAUSIBLE = (0.05, 20.0)
"""Micrometres per pixel of level 0 that a slide scanner can have: 72 dpi of an image editor is 353."""


def is_plausible(mpp: float) -> bool:
    """True for a resolution that a scanner can have."""
    return PLAUSIBLE[0] <= mpp <= PLAUSIBLE[1]


FILL = 255
"""The value of chunks that a store leaves out: white, as background nearly is."""


@dataclass(frozen=True)
class Level:
    """One resolution of a slide. `downsample` is the size of its pixel in pixels of level 0."""

    height: int
    width: int
    downsample: float = 1.0


@dataclass(frozen=True)
class SlideInfo:
    """Facts of a slide, as its file has them. They hold no label, barcode, name or other free text.

    Attributes:
        levels: finest first.
        mpp: micrometres per pixel (y, x) of level 0 as the file has it, plausible or not; None without.
        power: objective power.
        bounds: the scanned part of level 0 as (y, x, height, width), where the file tells it.
        background: the colour of what was not scanned.
        associated: names of further images (label, macro, ...); they may show the patient's name.
        reader: the library that reads the slide, with its version.
        vendor: the kind of file.
        details: technical facts that are safe to keep, for provenance (compression, tile size, ...).
        changes: what the reader does to the file's values besides decoding them; nothing where pixels are the file's.
        unreadable: what the file says about the size of a pixel, where that cannot be understood.
        notes: what a user should know of the file, such as images in it that are not read.
    """

    levels: tuple[Level, ...]
    mpp: tuple[float, float] | None
    reader: str
    vendor: str
    power: float | None = None
    bounds: tuple[int, int, int, int] | None = None
    background: tuple[int, int, int] = WHITE
    associated: tuple[str, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    unreadable: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of level 0."""
        return self.levels[0].height, self.levels[0].width


_LARGEST_READ = 64 << 20
"""Bytes that are read of a library at once; larger boxes are read in bands."""


class Reader:
    """An open file of one format, for the threads of one process.

    Attributes:
        info: Facts from the file.
        orientation: Turn of the image, as TIFF and Exif count it; it is read as it is stored.
        block: Pixels along a side of the blocks in which it is best read.
        planar: True where the decoder makes the bytes of a channel side by side, and not those of a pixel ([order]).
        takes_options: True where it knows channels and other than 8 bits.

    [order] JPEG and most readers make the three bytes of a pixel side by side, a store makes planes. Taking pixels
    apart costs ten times what copying them costs, a third of decoding them, and a convolution is faster on channels
    that lie last; so they are handed on in the order in which they come.
    """

    info: SlideInfo
    orientation: int = 1
    block: int = 512
    planar: bool = False
    takes_options: bool = True

    def __init__(self, path: Path | str, options: ReadOptions) -> None:
        self._path, self._options = Path(path), options

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        """The pixels of a box in coordinates of its level; outside, and where not scanned, background."""
        if not 0 <= level < len(self.info.levels):
            raise IndexError(f"level {level} of {self._path}: it has {len(self.info.levels)}")
        out = blank(height, width, self.info.background)
        top, left, bottom, right = clip_box(y, x, height, width, self.info.levels[level])
        band = max(256, _LARGEST_READ // (4 * max(1, right - left)))
        for start in range(top, bottom, band) if right > left else ():
            stop = min(start + band, bottom)
            out[start - y : stop - y, left - x : right - x] = self._part(level, start, left, stop, right)
        return out

    def _part(self, level: int, top: int, left: int, bottom: int, right: int) -> Pixels:
        """The pixels of a box inside its level."""
        raise NotImplementedError

    def read_into(self, level: int, y: int, x: int, out: Pixels) -> None:
        """Fills `out` (channel, y, x), of any strides, with the pixels whose corner is (y, x)."""
        to_planes(self.read(level, y, x, *out.shape[1:]), out)

    def empty(self, level: int, y: int, x: int, height: int, width: int) -> bool:
        """True if a box inside the level is known, without reading, to be white."""
        return False

    def associated(self, name: str) -> Pixels:
        """An associated image, by a name in `info.associated`. Ask for it only where a person wants it."""
        if name not in self.info.associated:
            raise SlideError(self._path, f"no associated image {name!r}; it has {list(self.info.associated)}")
        return self._associated(name)

    def _associated(self, name: str) -> Pixels:
        """The pixels of an associated image that is there."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the file."""


def level_downsample(base: Level | tuple[int, int], height: int, width: int) -> float:
    """The downsample of a level, from its size: the whole number that gives this size, if there is one.

    A level of 513 px of a slide of 2050 px is 4 times coarser with its last pixel half empty, not 3.996
    times: with the ratio of the sizes, positions would drift over the slide.
    """
    full = (base.height, base.width) if isinstance(base, Level) else base
    guess = round(max(full[0] / height, full[1] / width))
    for whole in (guess, guess + 1, guess - 1):
        if whole > 0 and all(
            size in (side // whole, -(-side // whole)) for size, side in ((height, full[0]), (width, full[1]))
        ):
            return float(whole)
    return (full[0] / height + full[1] / width) / 2


def clip_box(y: int, x: int, height: int, width: int, level: Level) -> tuple[int, int, int, int]:
    """The part of a box inside its level, as (top, left, bottom, right); may be empty."""
    return max(y, 0), max(x, 0), min(y + height, level.height), min(x + width, level.width)


def on_background(colours: Pixels, alpha: Pixels, background: tuple[int, int, int]) -> Pixels:
    """Colours in front of a background, which shows where they are transparent."""
    if alpha.min(initial=255) == 255:
        return colours
    cover = alpha[..., None].astype(np.float32) / 255
    mixed = colours * cover + np.array(background, np.float32) * (1 - cover)
    return np.rint(mixed).astype(np.uint8)


def to_planes(pixels: Pixels, out: Pixels) -> Pixels:
    """Copies pixels (y, x, channel) into an array (channel, y, x), in whichever order that lies."""
    if is_by_pixels(out):
        out.transpose(1, 2, 0)[...] = pixels
    else:  # plane by plane is twice as fast as at once
        for channel in range(out.shape[0]):
            out[channel] = pixels[..., channel]
    return out


def blank(height: int, width: int, colour: tuple[int, int, int]) -> Pixels:
    """Pixels of one colour."""
    return np.full((height, width, 3), colour, np.uint8)


GIGAPIXELS = Limit("WSI_TRAIN_MAX_GIGAPIXELS", 500)
"""Pixels of a slide, in 10^9. The largest slides of today's scanners have about 100."""


def check_size(path: Path, height: int, width: int) -> None:
    """Refuses an image without pixels, and one that declares more than a slide can have."""
    if height < 1 or width < 1:
        raise SlideError(path, f"declares an image of {width} x {height} px, which holds nothing")
    if reason := GIGAPIXELS.refusal(height * width / 1e9, f"declares {width} x {height} px", " gigapixels"):
        raise SlideError(path, reason)


def check_decoded(path: Path, what: str, size: int) -> None:
    """Refuses what would take too many bytes of memory at once."""
    if reason := too_much(what, size):
        raise SlideError(path, reason)


@dataclass(frozen=True)
class Range:
    """The values that become 0 and 255; what lies beyond is cut."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Range:
        """Reads `LOW:HIGH`."""
        try:
            low, high = map(float, text.split(":"))
        except ValueError:
            low = high = math.nan
        if not (low < high and math.isfinite(high - low)):
            raise UserError(f"--to_8bit {text}: expected LOW:HIGH, the values that become 0 and 255, such as 0:4095")
        return cls(low, high)

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    def apply(self, values: NDArray[Any]) -> Pixels:
        """The values in 8 bits, rounded to the nearest; what is no number becomes 0."""
        scaled = (values.astype(np.float64) - self.low) * (255 / (self.high - self.low))
        return np.rint(np.nan_to_num(np.clip(scaled, 0, 255), nan=0.0)).astype(np.uint8)


def to_bytes(values: NDArray[Any], scale: Range, *, has_alpha: bool) -> Pixels:
    """Values (..., sample) in 8 bits; a last sample that says what is transparent always counts to its type's end."""
    pixels = scale.apply(values)
    if has_alpha:
        most = float(np.iinfo(values.dtype).max) if values.dtype.kind in "iu" else 1.0
        pixels[..., -1] = Range(0, most).apply(values[..., -1])
    return pixels


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading slides that do not hold one image of 8 bits.

    Attributes:
        channel: The channel to take, by its name in the file or its number from 0.
        to_8bit: The range of values that is kept of pixels with other than 8 bits.
    """

    channel: str | None = None
    to_8bit: Range | None = None


PLAIN = ReadOptions()
"""Nothing is left out and nothing is scaled: a slide is one image of 8 bits, or is refused."""


def choose_channel(path: Path, wanted: str, names: Sequence[str], count: int) -> int:
    """The number of a channel that is given by name or number."""
    same = [i for i, name in enumerate(names) if name == wanted] or [
        i for i, name in enumerate(names) if name.casefold() == wanted.casefold()
    ]
    if len(same) == 1:
        return same[0]
    if not same and wanted.isascii() and wanted.isdigit() and int(wanted) < count:
        return int(wanted)
    problem = f"{len(same)} channels are named {wanted!r}" if same else f"there is no channel {wanted!r}"
    raise SlideError(path, f"{problem}; --channel can be {describe_channels(names, count)}")


def describe_channels(names: Sequence[str], count: int) -> str:
    """The channels that can be chosen: numbers, and names where there are any."""
    numbers = f"0 to {count - 1}" if count > 1 else "0"
    known = [name for name in names if name]
    return f"{numbers} or {', '.join(map(repr, known[:12]))}" if known else numbers


def check_bits(path: Path, dtype: np.dtype[Any], options: ReadOptions) -> Range | None:
    """The range by which pixels of this kind are scaled; None for those that have 8 bits already."""
    if dtype == np.uint8:
        return None
    if dtype.kind not in "iuf":
        raise SlideError(path, f"pixels are {dtype}; expected 8 bits a channel")
    if options.to_8bit is None:
        raise SlideError(
            path, f"pixels are {dtype}; expected 8 bits a channel: preprocess takes --to_8bit LOW:HIGH, the values "
            "that become 0 and 255"
        )  # fmt: skip
    return options.to_8bit


def room(planar: bool, *shape: int) -> NDArray[np.uint8]:
    """An array (..., channel, y, x) of bytes with anything in it.

    Its strides are those that PyTorch gives such a tensor, also along an axis of one position.
    """
    *lead, channels, height, width = shape
    if planar:
        return np.empty(shape, np.uint8)
    return np.moveaxis(np.empty((*lead, height, width, channels), np.uint8), -1, -3)


def is_by_pixels(array: NDArray[np.uint8]) -> bool:
    """True if the bytes of a pixel of an array (channel, y, x) lie side by side."""
    return array.strides[0] == 1 and array.shape[0] > 1


READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0)
"""Flags for `os.open`; Windows would translate the ends of lines."""
_seeking = threading.Lock()


def read_at(fd: int, count: int, offset: int) -> bytes:
    """Bytes from a place in a file, fewer than `count` only where the file ends.

    The system may give fewer than were asked for: where a signal interrupts a network file system, and above 2 GiB.
    """
    if hasattr(os, "pread"):
        data = os.pread(fd, count, offset)
    else:  # Windows, where a file has one position for all threads
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, count)
    if len(data) == count or not data:
        return data
    return data + read_at(fd, count - len(data), offset + len(data))
