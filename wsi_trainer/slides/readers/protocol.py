"""What every reader of slides offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..order import is_by_pixels

Pixels = NDArray[np.uint8]
"""Height, width, RGB."""

WHITE = (255, 255, 255)


@dataclass(frozen=True)
class Level:
    """One resolution of a slide. `downsample` is the size of its pixel in pixels of level 0."""

    height: int
    width: int
    downsample: float = 1.0


@dataclass(frozen=True)
class SlideInfo:
    """What a slide's file says about it. It holds no label, barcode, name or other free text.

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


@runtime_checkable
class Reader(Protocol):
    """An open slide. Safe to use from several threads, to fork with and to pickle."""

    info: SlideInfo

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        """The pixels of a box in coordinates of its level; outside, and where not scanned, background."""
        ...

    def associated(self, name: str) -> Pixels:
        """An associated image, by a name in `info.associated`. Ask for it only where a person wants it."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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


@runtime_checkable
class PlanesReader(Reader, Protocol):
    """A reader that can decode into planes that are there, which saves a copy of every pixel."""

    def read_planes(self, level: int, y: int, x: int, out: Pixels) -> None:
        """Fills `out` (channel, y, x), of any strides, with the pixels whose corner is (y, x)."""
        ...


def blank(height: int, width: int, colour: tuple[int, int, int]) -> Pixels:
    """Pixels of one colour."""
    return np.full((height, width, 3), colour, np.uint8)
