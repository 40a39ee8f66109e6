"""Files of features as other programs read them, and the checksum of what they were made of."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.patches import PatchConfig
from wsi_trainer.data.positions import chosen_patches
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.arrays import import_h5py, open_hdf5, own
from wsi_trainer.io.untrusted import Unreadable
from wsi_trainer.slide.formats.store import is_own_store
from wsi_trainer.store.identity import quick_hash
from wsi_trainer.store.manifest import read_manifest

Layout = Literal["trident", "stamp"]
_STREAM: dict[str, Any] = {"compression": "gzip", "compression_opts": 0, "fletcher32": True}
"""Chunks are streams of zlib that are not compressed, with a checksum. HDF5's own checksum of nothing but zeros is
zero, so it takes a hole, as a power cut leaves it, for rows of zeros; no stream of zlib begins with one.
"""
_VERSIONS = ("v110", "v110")
"""Versions of HDF5 whose metadata have checksums, the oldest such: all that read features know it."""
ROWS = 1024
"""Rows that are copied at a time, and of a chunk of the file."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Facts of a slide that a file of features holds beside the features."""

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


def write(
    path: Path, shape: tuple[int, int], batches: Iterable[NDArray[np.float32]], about: Written, layout: Layout
) -> None:
    """Write a file under another name first, so that a file of this name is whole.

    Args:
        path: The file.
        shape: Patches, and entries of the vector of each.
        batches: The features, some patches after the other.
        about: The slide.
        layout: The program whose file it is.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with import_h5py(path).File(partial, "w", libver=_VERSIONS) as file:
            made, digest = (
                _dataset(file, "features" if layout == "trident" else "feats", shape, np.float32),
                hashlib.sha256(),
            )
            start = 0
            for rows in _whole_chunks(batches):
                made[start : start + len(rows)] = rows
                digest.update(np.ascontiguousarray(rows).tobytes())
                start += len(rows)
            (_trident if layout == "trident" else _stamp)(file, made, digest.hexdigest(), about)
        with partial.open("r+b") as opened:  # Windows makes nothing durable that is opened to read
            os.fsync(opened.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _whole_chunks(batches: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """Rows of a chunk of the file at a time: HDF5 would read and write a chunk again for each batch in it."""
    waiting: list[NDArray[np.float32]] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= ROWS:
            rows = np.concatenate(waiting)
            whole = len(rows) - len(rows) % ROWS
            yield rows[:whole]
            waiting = [rows[whole:]]
    if waiting and len(rows := np.concatenate(waiting)):
        yield rows


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


def _trident(file: Any, rows: Any, checksum: str, about: Written) -> None:
    """`features` and `coords` with TRIDENT's attributes; CLAM and MIL-Lab read the same two."""
    coords = _filled(file, np.rint(about.corners).astype(np.int64))
    for dataset in (rows, coords):
        dataset.attrs["name"] = about.name
        dataset.attrs["savetodir"] = ""
    rows.attrs["encoder"], rows.attrs["weights_sha256"] = about.encoder, about.weights
    rows.attrs["sha256"], rows.attrs["origin_sha256"] = checksum, about.origin
    coords.attrs["patch_size"] = about.size
    coords.attrs["patch_size_level0"] = round(about.size * about.scale)
    coords.attrs["overlap"] = about.size - about.step
    coords.attrs["level0_height"], coords.attrs["level0_width"] = about.slide
    if about.mpp is not None:
        coords.attrs["mpp"] = about.mpp
        coords.attrs["target_magnification"] = 10 / about.mpp
        coords.attrs["level0_magnification"] = 10 / about.mpp * about.scale


def _stamp(file: Any, rows: Any, checksum: str, about: Written) -> None:
    """`feats` and `coords` in micrometres, and STAMP's attributes at the root."""
    assert about.mpp is not None
    _filled(file, (about.corners / about.scale * about.mpp).astype(np.float32))
    file.attrs["extractor"], file.attrs["unit"] = about.encoder, "um"
    file.attrs["tile_size_um"], file.attrs["tile_size_px"] = about.size * about.mpp, about.size
    file.attrs["sha256"], file.attrs["weights_sha256"] = checksum, about.weights
    file.attrs["origin_sha256"] = about.origin


def _filled(file: Any, corners: NDArray[Any]) -> Any:
    made = _dataset(file, "coords", corners.shape, corners.dtype)
    made[:] = corners
    return made


def _dataset(file: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """A dataset whose chunks have checksums."""
    return file.create_dataset(name, shape, dtype, chunks=(min(ROWS, shape[0]), shape[1]), **_STREAM)


def origin_of(record: SlideRecord, patches: PatchConfig, half: bool) -> str:
    """A checksum of all that decides about the features of a slide by one encoder.

    Args:
        record: The slide.
        patches: The choice of patches.
        half: True for an encoder that works in bfloat16.
    """
    about = {
        "pixels": _pixels(record), "source_mpp": record.mpp, "size": patches.size, "mpp": patches.resolution,
        "half": half, "places": _places(record, patches),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _pixels(record: SlideRecord) -> str:
    """A store's by the hashes in its manifest, any other slide's by parts of its files."""
    if not is_own_store(record.path):
        return quick_hash(record.path)
    try:
        files = read_manifest(record.path)["files"]
    except ValueError as error:
        raise SlideError(record.path, str(error)) from error
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _places(record: SlideRecord, patches: PatchConfig) -> list[object]:
    if patches.positions is not None:
        chosen = chosen_patches(patches.positions, record.path)
        return ["given", hashlib.sha256(chosen.points.tobytes()).hexdigest(), chosen.middle]
    return [patches.over, patches.step, patches.min_tissue if patches.over == "tissue" else None]
