"""Files of features of a slide's patches: of this package, of CLAM, TRIDENT and STAMP, read and written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box
from wsi_trainer.data.manifest import FEATURES, SlideRecord
from wsi_trainer.data.patches import PatchConfig, chosen_patches, coords_of
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.arrays import import_h5py, open_hdf5, own
from wsi_trainer.io.untrusted import Unreadable
from wsi_trainer.models.weights import read_weights
from wsi_trainer.slide.formats.store import is_own_store
from wsi_trainer.slide.identity import HASH, SlideId, attributes_of, hash_of_1_0
from wsi_trainer.slide.names import file_about
from wsi_trainer.slide.places import Places
from wsi_trainer.slide.views import View
from wsi_trainer.store.manifest import read_manifest

KEYS = ("features", "feats", "patch_embeddings")
"""What the dataset is called: by CLAM, TRIDENT and this package; by STAMP; by its newer versions."""


def features_of(folder: Path, record: SlideRecord) -> Path:
    """The file of a slide in a folder; an error where there is none, or more than one."""
    found = file_about(folder, record.called, FEATURES, "data.features")
    assert found is not None
    return found[1]


def check_one_each(folder: Path, records: Iterable[SlideRecord]) -> None:
    """Refuse slides of one name, which lie in several folders or have several endings: they would have one file."""
    known: dict[Path, SlideRecord] = {}
    for record in records:
        found = file_about(folder, record.called, FEATURES)
        first = record if found is None else known.setdefault(found[1], record)
        if found is not None and first is not record:
            raise UserError(
                f"{first.path} and {record.path} would both have the features {found[1].name} of {folder}; name one "
                "otherwise, and have its features made again"
            )


class FeatureSource(View):
    """The features of a slide: shape (1, width, patches, 1), a map of which each position is a patch.

    Of an HDF5 file a box reads its rows alone. What was stored in half precision becomes float32.
    """

    dtype = torch.float32

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self._rows = _tensor(path) if path.suffix == ".pt" else None
        rows, width = _shape(path) if self._rows is None else self._rows.shape
        if not rows:
            raise SlideError(path, "has no patches; leave the slide out of the manifest")
        self.shape = (1, width, rows, 1)
        super().__init__(name or str(path))

    @property
    def places(self) -> Places:
        """Places and sizes of the patches that the features were made of.

        A file that says nothing of their size, as those of CLAM, has patches side by side.

        Raises:
            SlideError: The file does not say it.
        """
        if self._rows is not None:
            raise SlideError(
                self.path,
                "has features and no places; take CLAM's h5_files, or the HDF5 files of TRIDENT, STAMP or "
                "`wsi-train embed`",
            )
        found = coords_of(self.path)
        if len(found) != self.shape[2]:
            raise SlideError(self.path, f"has {self.shape[2]} features and {len(found)} coords; they belong together")
        return replace(found, side=found.side or found.spacing)

    def load(self, box: Box) -> Tensor:
        """The features (1, width, patches, 1 or 0) of a box of patches."""
        (first, left), (last, right) = box.lo, box.hi
        rows = self._read(first, last) if self._rows is None else self._rows[first:last]
        columns = rows.float().t().contiguous()  # of two dimensions, which PyTorch transposes block by block
        return columns[None, :, :, None][..., left:right]

    def _read(self, first: int, last: int) -> Tensor:
        with _reading(self.path) as file:
            found = _dataset(self.path, file)
            return torch.from_numpy(np.asarray(found[0, first:last] if found.ndim == 3 else found[first:last]))


def _tensor(path: Path) -> Tensor:
    content = read_weights(path)
    if isinstance(content, Tensor) and content.ndim == 3 and content.shape[0] == 1:
        content = content[0]
    if not isinstance(content, Tensor) or content.ndim != 2:
        raise UserError(f"{path} holds no tensor of (patches, features), as CLAM's pt_files do")
    return content


def _shape(path: Path) -> tuple[int, int]:
    with _reading(path) as file:
        found = _dataset(path, file)
        rows, width = found.shape[-2:]
        return int(rows), int(width)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with open_hdf5(path) as file:
            yield file
    except Unreadable as error:
        raise SlideError(path, error.reason) from error


def _dataset(path: Path, file: Any) -> Any:
    name = next((key for key in KEYS if key in file), None)
    if name is None:
        raise SlideError(path, f"has none of {', '.join(KEYS)}; it has {', '.join(map(str, file)) or 'nothing'}")
    found = own(path, file, name)
    batched = getattr(found, "ndim", 0) == 3 and found.shape[0] == 1
    if getattr(found, "ndim", 0) != 2 and not batched:
        raise SlideError(path, f"{name} has the shape {getattr(found, 'shape', ())}; it must be (patches, features)")
    if found.dtype.kind != "f":
        raise SlideError(path, f"{name} is of {found.dtype}; features are floating point numbers")
    return found


Layout = Literal["trident", "stamp"]
CHUNK = 64
"""Rows of a chunk, which has a checksum; it fits into HDF5's cache, whatever the batches are."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Facts of a slide that a file of features holds beside the features."""

    name: str
    places: Places
    """Where its patches lie, for the layout of STAMP in micrometres."""
    size: int
    """Pixels along a side of a patch."""
    step: int
    """Pixels from one patch of the grid to the next."""
    mpp: float | None
    """Micrometres per pixel of a patch, where they are known."""
    encoder: str
    weights: str
    """Checksum of the encoder's weights."""
    origin: str
    """Checksum of what its features were made of."""
    slide_hash: str
    """The hash of the slide, by which it is known again; see `SlideId`."""


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
        with import_h5py(path).File(partial, "w") as file:
            name, chunks = "features" if layout == "trident" else "feats", (min(CHUNK, shape[0]), shape[1])
            made = file.create_dataset(name, shape, np.float32, chunks=chunks, fletcher32=True)
            digest, start = hashlib.sha256(), 0
            for rows in batches:
                made[start : start + len(rows)] = rows
                digest.update(np.ascontiguousarray(rows).tobytes())
                start += len(rows)
            (_trident if layout == "trident" else _stamp)(file, made, digest.hexdigest(), about)
        with partial.open("r+b") as opened:  # Windows makes nothing durable that is opened to read
            os.fsync(opened.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def made_with(path: Path) -> tuple[str, str]:
    """The checksums of the weights that a file's features were made with, and of what they were made of.

    Either is empty where another program wrote the file, the second where an earlier version did.
    """
    try:
        found = attributes_of(path)
    except Unreadable as error:
        raise UserError(f"{error}; remove it, and it is made again") from error
    return found.get("weights_sha256", ""), found.get("origin_sha256", "")


def _trident(file: Any, rows: Any, checksum: str, about: Written) -> None:
    """`features` and `coords` with TRIDENT's attributes; CLAM and MIL-Lab read the same two."""
    places = about.places
    assert places.side is not None and places.slide is not None
    coords = file.create_dataset("coords", data=np.rint(places.points).astype(np.int64))
    for dataset in (rows, coords):
        dataset.attrs["name"] = about.name
        dataset.attrs["savetodir"] = ""
    rows.attrs["encoder"], rows.attrs["weights_sha256"] = about.encoder, about.weights
    rows.attrs["sha256"], rows.attrs["origin_sha256"], rows.attrs[HASH] = checksum, about.origin, about.slide_hash
    coords.attrs["patch_size"] = about.size
    coords.attrs["patch_size_level0"] = round(places.side)
    coords.attrs["overlap"] = about.size - about.step
    coords.attrs["level0_height"], coords.attrs["level0_width"] = places.slide
    if about.mpp is not None:
        coords.attrs["mpp"] = about.mpp
        coords.attrs["target_magnification"] = 10 / about.mpp
        coords.attrs["level0_magnification"] = 10 / about.mpp * (places.side / about.size)


def _stamp(file: Any, rows: Any, checksum: str, about: Written) -> None:
    """`feats` and `coords` in micrometres, and STAMP's attributes at the root."""
    assert about.mpp is not None and about.places.micrometres
    file.create_dataset("coords", data=about.places.points.astype(np.float32))
    file.attrs["extractor"], file.attrs["unit"] = about.encoder, "um"
    file.attrs["tile_size_um"], file.attrs["tile_size_px"] = about.size * about.mpp, about.size
    file.attrs["sha256"], file.attrs["weights_sha256"] = checksum, about.weights
    file.attrs["origin_sha256"], file.attrs[HASH] = about.origin, about.slide_hash


def origin_of(record: SlideRecord, patches: PatchConfig, half: bool, of_1_0: bool = False) -> str:
    """A checksum of all that decides about the features of a slide by one encoder.

    Args:
        record: The slide.
        patches: The choice of patches.
        half: True for an encoder that works in bfloat16.
        of_1_0: The checksum that 1.0 wrote, which the name of the slide's file changes.
    """
    about = {
        "pixels": _pixels(record, of_1_0), "source_mpp": record.mpp, "size": patches.size,
        "mpp": None if patches.mpp == "own" else patches.mpp, "half": half, "places": _places(record, patches),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _pixels(record: SlideRecord, of_1_0: bool) -> str:
    """A store's by the hashes in its manifest, any other slide's by its own."""
    if not is_own_store(record.path):
        return hash_of_1_0(record.path) if of_1_0 else SlideId.of(record.path).hash
    try:
        files = read_manifest(record.path)["files"]
    except ValueError as error:
        raise SlideError(record.path, str(error)) from error
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _places(record: SlideRecord, patches: PatchConfig) -> list[object]:
    if patches.positions is not None:
        chosen = chosen_patches(patches.positions, record.called)
        return ["given", hashlib.sha256(chosen.points.tobytes()).hexdigest(), chosen.middle]
    return [patches.over, patches.step, patches.min_tissue if patches.over == "tissue" else None]
