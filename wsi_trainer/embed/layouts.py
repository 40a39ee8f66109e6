"""Files of features as other programs read them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.foreign import Unreadable
from wsi_trainer.foreign.arrays import import_h5py, open_hdf5, own

Layout = Literal["trident", "stamp"]
_CHECKSUMS = ("v110", "v110")
"""Versions of HDF5 whose metadata have checksums, the oldest such: all that read features know it. In 1.8 the index of
chunks has none."""
_STREAM: dict[str, Any] = {"compression": "gzip", "compression_opts": 0}
"""Chunks are streams of zlib that are not compressed. HDF5's own checksum of nothing but zeros is zero, so it takes a
hole, as a power cut leaves it, for rows of zeros; no stream of zlib begins with one.
"""
ROWS = 1024
"""Rows that are copied at a time, and of a chunk of the file."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a file of features says of a slide beside the features."""

    name: str
    corners: NDArray[np.float64]
    """x and y of the upper left corners of patches, in pixels of level 0 of the slide."""
    slide: tuple[int, int]
    """Height and width of level 0 of the slide."""
    scale: float
    """Pixels of level 0 along one pixel of a patch."""
    size: int
    step: int
    mpp: float | None
    """Micrometres per pixel of a patch, where they are known."""
    encoder: str
    weights: str
    """Checksum of the encoder's weights."""
    origin: str
    """Checksum of what its features were made of."""


def write(path: Path, features: NDArray[np.float32], about: Written, layout: Layout) -> None:
    """Write a file at once: under another name first, so that a file of this name is whole."""
    partial = path.with_name(f".{path.name}.partial")
    with import_h5py(path).File(partial, "w", libver=_CHECKSUMS) as file:
        _LAYOUTS[layout](file, features, about)
    with partial.open("rb") as opened:
        os.fsync(opened.fileno())
    os.replace(partial, path)


def made_with(path: Path) -> tuple[str, str]:
    """The checksums of the weights that a file's features were made with, and of what they were made of.

    Either is empty where another program wrote the file, the second where an earlier version did.
    """
    try:
        with open_hdf5(path) as file:
            features = own(path, file, "features")
            found = file.attrs if "feats" in file else {} if features is None else features.attrs
            return str(found.get("weights_sha256", "")), str(found.get("origin_sha256", ""))
    except Unreadable as error:
        raise UserError(f"{error}; remove it, and it is made again") from error


def checksum(rows: NDArray[np.float32]) -> str:
    """SHA-256 of the features, row by row in order."""
    found = hashlib.sha256()
    for start in range(0, len(rows), ROWS):
        found.update(np.ascontiguousarray(rows[start : start + ROWS]).tobytes())
    return found.hexdigest()


def _trident(file: Any, features: NDArray[np.float32], about: Written) -> None:
    """`features` and `coords` with TRIDENT's attributes; CLAM and MIL-Lab read the same two."""
    rows = _checked(file, "features", features)
    coords = _checked(file, "coords", np.rint(about.corners).astype(np.int64))
    for dataset in (rows, coords):
        dataset.attrs["name"] = about.name
        dataset.attrs["savetodir"] = ""
    rows.attrs["encoder"], rows.attrs["weights_sha256"] = about.encoder, about.weights
    rows.attrs["sha256"], rows.attrs["origin_sha256"] = checksum(features), about.origin
    coords.attrs["patch_size"] = about.size
    coords.attrs["patch_size_level0"] = round(about.size * about.scale)
    coords.attrs["overlap"] = about.size - about.step
    coords.attrs["level0_height"], coords.attrs["level0_width"] = about.slide
    if about.mpp is not None:
        coords.attrs["mpp"] = about.mpp
        coords.attrs["target_magnification"] = 10 / about.mpp
        coords.attrs["level0_magnification"] = 10 / about.mpp * about.scale


def _stamp(file: Any, features: NDArray[np.float32], about: Written) -> None:
    """`feats` and `coords` in micrometres, and what STAMP asks for at the root."""
    if about.mpp is None:
        raise UserError(
            f"{about.name}: STAMP counts in micrometres, which are not known; fill in the manifest's column mpp"
        )
    _checked(file, "feats", features)
    _checked(file, "coords", (about.corners / about.scale * about.mpp).astype(np.float32))
    file.attrs["extractor"], file.attrs["unit"] = about.encoder, "um"
    file.attrs["tile_size_um"], file.attrs["tile_size_px"] = about.size * about.mpp, about.size
    file.attrs["sha256"], file.attrs["weights_sha256"] = checksum(features), about.weights
    file.attrs["origin_sha256"] = about.origin


def _checked(file: Any, name: str, rows: NDArray[Any]) -> Any:
    """A dataset whose chunks have checksums, filled a chunk at a time."""
    chunks = (min(ROWS, len(rows)), rows.shape[1])
    made = file.create_dataset(name, rows.shape, rows.dtype, chunks=chunks, fletcher32=True, **_STREAM)
    for start in range(0, len(rows), ROWS):
        made[start : start + ROWS] = rows[start : start + ROWS]
    return made


_LAYOUTS: dict[str, Callable[[Any, NDArray[np.float32], Written], None]] = {"trident": _trident, "stamp": _stamp}
