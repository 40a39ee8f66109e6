"""What a user says about a slide that is more than one image of 8 bits: which channel, and which values matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError

from ..errors import SlideError
from .protocol import Pixels


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
    """How slides are read that do not hold one image of 8 bits.

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
