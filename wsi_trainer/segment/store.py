"""Predicted classes as an OME label image that is written block by block."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from wsi_trainer.foreign import read_json
from wsi_trainer.foreign.arrays import open_zarr_array
from wsi_trainer.places.geojson import PathClass
from wsi_trainer.places.ngff import multiscale
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.store.metadata import NGFF, group, write_json

CHUNK = 512
BAND = 4096
"""Rows that are halved at a time; even, so that each band begins a pixel of the next level."""


def create_labels(path: Path, size: tuple[int, int], classes: Sequence[str], place: SlideTransform) -> Any:
    """An empty NGFF 0.5 label, an earlier one replaced; returns its array (height, width) of the classes' places.

    Args:
        path: The store.
        size: Height and width of the image.
        classes: Their names; the first is background, which takes no space.
        place: Where the image lies in its slide.
    """
    shutil.rmtree(path, ignore_errors=True)
    label = {
        "version": NGFF,
        "colors": [
            {"label-value": number, "rgba": [*PathClass.of(name, number).colour, 255]}
            for number, name in enumerate(classes)
            if number
        ],
        "properties": [{"label-value": number, "class": name} for number, name in enumerate(classes)],
    }
    image = multiscale(path.name.split(".")[0], place)
    write_json(path / "zarr.json", group({"ome": {"version": NGFF, "multiscales": [image], "image-label": label}}))
    return _level(path, 0, size)


def add_levels(path: Path, place: SlideTransform) -> None:
    """Coarser levels beside level 0, each half of the one before, until one fits a chunk.

    A pixel has the label of the upper left of the four it stands for, since labels have no mean. Half a pixel lies
    between their centres and its own, which the translation says.
    """
    content = read_json(path / "zarr.json")
    finer: Any = open_zarr_array(path / "0")
    level = 0
    while max(finer.shape) > CHUNK:
        level += 1
        coarser = _level(path, level, tuple(-(-side // 2) for side in finer.shape))
        for top in range(0, finer.shape[0], BAND):
            part = np.asarray(finer[top : top + BAND])[::2, ::2]
            coarser[top // 2 : top // 2 + len(part)] = part
        finer = coarser
    ome = content["attributes"]["ome"]
    ome["multiscales"] = [multiscale(ome["multiscales"][0]["name"], place, level + 1)]
    write_json(path / "zarr.json", content)


def _level(path: Path, level: int, size: tuple[int, ...]) -> Any:
    chunks = tuple(min(CHUNK, side) for side in size)
    return zarr.create_array(
        path / str(level), shape=size, dtype="uint8", chunks=chunks, dimension_names=("y", "x"), overwrite=True
    )
