"""A map as an OME-Zarr image that viewers lay over the slide."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Zlib
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.places.ngff import multiscale
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.store.layout import PROVENANCE
from wsi_trainer.store.metadata import group, write_json

CHUNK = 512


def write_layer(
    path: Path, values: NDArray[np.float32], place: SlideTransform, facts: Mapping[str, Any], version: str = "0.5"
) -> None:
    """Write a map as an NGFF image with the axes y and x, in the coordinates of the original slide.

    Args:
        path: The store; an earlier one is replaced.
        values: (rows, columns).
        place: Where the map lies in the slide, one pixel of the image being one position. Without micrometres the
            unit of the axes is one of the slide's pixels.
        facts: What the map shows and how it was made.
        version: Of NGFF: 0.5, or 0.4 for software that reads no other, such as QuPath's.
    """
    shutil.rmtree(path, ignore_errors=True)
    image = multiscale(path.name.split(".")[0], place)
    try:
        WRITERS[version](path, values, image, {**facts, "place": place.record()})
    except zarr.errors.BaseZarrError as error:  # what was there is removed: somebody else has begun to write there
        raise UserError(f"{path} cannot be written: {error}; does another run write maps there?") from error


def _write_05(path: Path, values: NDArray[np.float32], image: dict[str, Any], facts: dict[str, Any]) -> None:
    ome = {"version": "0.5", "multiscales": [image]}
    write_json(path / "zarr.json", group({"ome": ome, PROVENANCE: facts}))
    array = zarr.create_array(
        path / "0", shape=values.shape, dtype="float32", chunks=_chunks(values), dimension_names=("y", "x"),
        overwrite=True,
    )  # fmt: skip
    array[:] = values


def _write_04(path: Path, values: NDArray[np.float32], image: dict[str, Any], facts: dict[str, Any]) -> None:
    top = zarr.open_group(path, mode="w", zarr_format=2)
    top.attrs.update({"multiscales": [{"version": "0.4", **image}], PROVENANCE: facts})
    array = top.create_array(
        "0", shape=values.shape, dtype="float32", chunks=_chunks(values), compressors=[Zlib(level=3)],
        chunk_key_encoding={"name": "v2", "separator": "/"},
    )  # fmt: skip
    array[:] = values


Writer = Callable[[Path, NDArray[np.float32], dict[str, Any], dict[str, Any]], None]
WRITERS: Mapping[str, Writer] = {"0.5": _write_05, "0.4": _write_04}


def _chunks(values: NDArray[np.float32]) -> tuple[int, ...]:
    return tuple(min(CHUNK, side) for side in values.shape)
