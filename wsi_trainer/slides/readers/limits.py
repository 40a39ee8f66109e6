"""How much a file may ask for: an image of a few bytes can declare sizes that no machine has memory for.

A limit is read from the environment each time, so that it holds in worker processes too.
"""

from __future__ import annotations

import math
from pathlib import Path

from wsi_trainer.foreign import Limit
from wsi_trainer.foreign.pictures import DECODED

from ..errors import SlideError

GIGAPIXELS = Limit("WSI_TRAIN_MAX_GIGAPIXELS", 500)
"""Pixels of a slide, in 10^9. The largest slides of today's scanners have about 100."""

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
