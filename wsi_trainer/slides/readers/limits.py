"""How much a file may ask for: an image of a few bytes can declare sizes that no machine has memory for.

A limit is read from the environment each time, so that it holds in worker processes too.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from wsi_trainer.errors import UserError

from ..errors import SlideError


@dataclass(frozen=True)
class Limit:
    """A number that the user can raise with an environment variable."""

    variable: str
    default: float

    @property
    def value(self) -> float:
        text = os.environ.get(self.variable, "")
        try:
            value = float(text) if text else self.default
        except ValueError:
            value = math.nan
        if not value > 0:
            raise UserError(f"{self.variable}={text}: expected a number above 0")
        return value


GIGAPIXELS = Limit("WSI_TRAIN_MAX_GIGAPIXELS", 500)
"""Pixels of a slide, in 10^9. The largest slides of today's scanners have about 100."""

DECODED = Limit("WSI_TRAIN_MAX_DECODED_MIB", 512)
"""Memory of what has to be decoded at once: a tile or a strip of a slide, a chunk of a store, a PNG, an overview."""

_MIB = 1 << 20


def check_size(path: Path, height: int, width: int) -> None:
    """Refuses an image without pixels, and one that declares more than a slide can have."""
    if height < 1 or width < 1:
        raise SlideError(path, f"declares an image of {width} x {height} px, which holds nothing")
    found = height * width / 1e9
    if found > GIGAPIXELS.value:
        raise SlideError(
            path, f"declares {width} x {height} px, more than the limit of {GIGAPIXELS.value:g} gigapixels; "
            f"if that is right, set {GIGAPIXELS.variable}={math.ceil(found)} in the environment"
        )  # fmt: skip


def check_decoded(path: Path, what: str, size: int) -> None:
    """Refuses what would take too many bytes of memory at once."""
    found = size / _MIB
    if found > DECODED.value:
        raise SlideError(
            path, f"{what} would take {math.ceil(found)} MiB of memory at once, more than the limit of "
            f"{DECODED.value:g}; if that is right, set {DECODED.variable}={math.ceil(found)} in the environment"
        )  # fmt: skip
