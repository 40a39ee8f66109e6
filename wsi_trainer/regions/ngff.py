"""OME-Zarr images that viewers lay over the slide: maps and labels, in the coordinates of the original slide."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Zlib
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.io.arrays import open_zarr_array
from wsi_trainer.io.files import write_json
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.slide.geometry import PROVENANCE, SlideTransform
from wsi_trainer.store.ngff import NGFF, multiscale, with_systems

CHUNK = 512
BAND = 4096
"""Rows that are halved at a time; even, so that each band begins a pixel of the next level."""


def create_image(
    path: Path, size: tuple[int, ...], dtype: str, place: SlideTransform, facts: Mapping[str, Any], version: str = NGFF
) -> Any:
    """An empty NGFF image with the axes y and x, or c before them, an earlier one replaced; returns its array.

    Args:
        path: The store.
        size: Height and width of the image; before them the number of its channels, if it has an axis of them.
        dtype: Type of its values.
        place: Position of the image in its slide.
        facts: Further attributes beside the multiscales.
        version: Of NGFF: 0.5; 0.6, which also has the slide's pixels as a coordinate system; or 0.4 for software that
            reads no other, such as QuPath's.
    """
    shutil.rmtree(path, ignore_errors=True)
    image = multiscale(path.name.split(".")[0], place, channels=len(size) > 2)
    image = with_systems(image, place) if version == "0.6" else image
    old = version == "0.4"
    attributes = {"multiscales": [{"version": version, **image}], **facts} if old else {
        "ome": {"version": version, "multiscales": [image], **{k: v for k, v in facts.items() if k != PROVENANCE}},
        **{k: v for k, v in facts.items() if k == PROVENANCE},
    }  # fmt: skip
    try:
        zarr.create_group(path, zarr_format=2 if old else 3, attributes=attributes)
        return _level(path, 0, size, dtype, old)
    except zarr.errors.BaseZarrError as error:  # what was there is removed: somebody else has begun to write there
        raise UserError(f"{path} cannot be written: {error}; does another run write there?") from error


def write_map(
    path: Path, values: NDArray[np.float32], place: SlideTransform, facts: Mapping[str, Any], version: str = NGFF
) -> None:
    """Write a map, of which one position is a pixel of the image at this position in the slide."""
    about = {PROVENANCE: {**facts, "place": place.record()}}
    create_image(path, values.shape, "float32", place, about, version)[:] = values


def create_labels(path: Path, size: tuple[int, int], classes: Sequence[str], place: SlideTransform) -> Any:
    """An empty label image; returns its array (height, width) of the classes' indices, 0 being background."""
    label = {
        "version": NGFF,
        "colors": [
            {"label-value": number, "rgba": [*PathClass.of(name, number).colour, 255]}
            for number, name in enumerate(classes)
            if number
        ],
        "properties": [{"label-value": number, "class": name} for number, name in enumerate(classes)],
    }
    return create_image(path, size, "uint8", place, {"image-label": label, PROVENANCE: {"place": place.record()}})


def add_levels(path: Path, place: SlideTransform) -> None:
    """Coarser levels beside level 0, each half of the one before, until one fits a chunk.

    A pixel has the value of the upper left of the four it stands for, since labels have no mean. Half a pixel lies
    between their centres and its own, which the translation says.
    """
    content = read_json(path / "zarr.json")
    finer: Any = open_zarr_array(path / "0")
    level = 0
    while max(finer.shape[-2:]) > CHUNK:
        level += 1
        size = (*finer.shape[:-2], *(-(-side // 2) for side in finer.shape[-2:]))
        coarser = _level(path, level, size, str(finer.dtype))
        for top in range(0, finer.shape[-2], BAND):
            part = np.asarray(finer[..., top : top + BAND, :])[..., ::2, ::2]
            coarser[..., top // 2 : top // 2 + part.shape[-2], :] = part
        finer = coarser
    ome = content["attributes"]["ome"]
    name = ome["multiscales"][0]["name"]
    ome["multiscales"] = [multiscale(name, place, level + 1, channels=finer.ndim > 2)]
    write_json(path / "zarr.json", content)


def _level(path: Path, level: int, size: tuple[int, ...], dtype: str = "uint8", old: bool = False) -> Any:
    how: dict[str, Any] = {"dimension_names": ("c", "y", "x")[-len(size) :]}
    if old:
        how = {"zarr_format": 2, "compressors": [Zlib(level=3)], "chunk_key_encoding": {"name": "v2", "separator": "/"}}
    chunks = (*(1 for _ in size[:-2]), *(min(CHUNK, side) for side in size[-2:]))
    return zarr.create_array(path / str(level), shape=size, dtype=dtype, chunks=chunks, overwrite=True, **how)
