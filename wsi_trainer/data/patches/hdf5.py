"""`coords` in HDF5 files, as CLAM and TRIDENT write them: upper left corners, x and y in pixels of level 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.data.patches.chosen import Chosen
from wsi_trainer.foreign import Unreadable
from wsi_trainer.foreign.arrays import open_hdf5, own
from wsi_trainer.slide.errors import SlideError

MOST = 10_000_000
"""Patches that a slide can have: a file that claims more is damaged."""


def read_coords(path: Path) -> Chosen:
    """The patches of a file, with what its attributes say of their size and of the slide."""
    try:
        with open_hdf5(path) as file:
            found = own(path, file, "coords")
            if not hasattr(found, "dtype"):
                raise SlideError(path, f"has no dataset coords; it has {', '.join(map(str, file)) or 'none'}")
            if found.ndim != 2 or found.shape[1] != 2 or found.shape[0] > MOST or found.dtype.kind not in "iuf":
                raise SlideError(path, f"coords is {found.shape} of {found.dtype}; it must be (patches, 2) of numbers")
            points, attributes = found[()].astype(np.float64), dict(found.attrs)
    except Unreadable as error:
        raise SlideError(path, error.reason) from error
    try:
        return Chosen(path, points, middle=False, side=side_of(path, attributes), slide=slide_of(attributes))
    except (TypeError, ValueError) as error:
        raise SlideError(path, f"an attribute of coords is no number: {error}") from error


def side_of(path: Path, attributes: Mapping[str, Any]) -> float:
    """Pixels of level 0 along a side of a patch: TRIDENT says them, CLAM says those of a level and what it shrinks."""
    if "patch_size_level0" in attributes:
        return _number(attributes["patch_size_level0"])
    if "patch_size" in attributes and "downsample" in attributes:
        return _number(attributes["patch_size"]) * _number(attributes["downsample"])
    if "patch_size" in attributes and "patch_level" in attributes and _number(attributes["patch_level"]) == 0:
        return _number(attributes["patch_size"])
    raise SlideError(
        path,
        "coords says nothing of the size of its patches: there is neither patch_size_level0 (TRIDENT) nor patch_size "
        "with downsample (CLAM); take the file that was written when patches were chosen, not that of features",
    )


def slide_of(attributes: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of level 0 of the slide, which TRIDENT says."""
    if "level0_width" not in attributes or "level0_height" not in attributes:
        return None
    return int(_number(attributes["level0_height"])), int(_number(attributes["level0_width"]))


def _number(value: Any) -> float:
    """An attribute as a number above or equal to 0; of x and y, which a shrunk level has, the mean."""
    number = float(np.mean(np.asarray(value, np.float64)))
    if not 0 <= number < 1e9:
        raise ValueError(f"{value!r}")
    return number
