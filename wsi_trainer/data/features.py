"""Features of a slide's patches that were made before: files of this package, and of CLAM, TRIDENT and STAMP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_plugin import Box
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.arrays import open_hdf5, own
from wsi_trainer.io.untrusted import Unreadable
from wsi_trainer.models.weights import read_weights
from wsi_trainer.slide.views import View
from wsi_trainer.store.identity import plain_name

KEYS = ("features", "feats", "patch_embeddings")
"""What the dataset is called: by CLAM, TRIDENT and this package; by STAMP; by its newer versions."""
ENDINGS = ("{}.h5", "{}.pt")


def features_of(folder: Path, slide: Path) -> Path:
    """The file of a slide in a folder; an error where there is none, or more than one."""
    name = plain_name(slide)
    paths = [folder / ending.format(name) for ending in ENDINGS]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise SlideError(slide, f"data.features has none of {', '.join(path.name for path in paths)} in {folder}")
    if len(there) > 1:
        raise SlideError(slide, f"{folder} has {' and '.join(path.name for path in there)}; leave one of them there")
    return there[0]


def check_one_each(folder: Path, slides: Iterable[Path]) -> None:
    """Refuse slides of one name, which lie in several folders or have several endings: they would have one file."""
    known: dict[str, Path] = {}
    for slide in slides:
        first = known.setdefault(plain_name(slide), slide)
        if first != slide:
            raise UserError(
                f"{first} and {slide} would both have the features {plain_name(slide)}.h5 of {folder}; name one "
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

    def load(self, box: Box) -> Tensor:
        """The features (1, width, patches, 1 or 0) of a box of patches."""
        (first, left), (last, right) = box.lo, box.hi
        rows = self._read(first, last) if self._rows is None else self._rows[first:last]
        return rows.float().t()[None, :, :, None][..., left:right].contiguous()

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
