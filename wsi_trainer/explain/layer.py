"""A map as an OME-Zarr image that viewers lay over the slide."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from wsi_trainer.slides.store.metadata import NGFF, PROVENANCE, group, write_json

CHUNK = 512


def write_layer(
    path: Path,
    values: NDArray[np.float32],
    stride: int,
    mpp: tuple[float, float] | None,
    facts: Mapping[str, Any],
) -> None:
    """Write a map as an NGFF 0.5 image with the axes y and x, in the slide's own coordinates.

    Args:
        path: The store; an earlier one is replaced.
        values: (rows, columns).
        stride: Pixels of the slide for one position.
        mpp: Micrometres for one of these pixels; without it the unit of the axes is that pixel.
        facts: What the map shows and how it was made.
    """
    shutil.rmtree(path, ignore_errors=True)
    ome = {"version": NGFF, "multiscales": [_multiscale(path.name.split(".")[0], stride, mpp)]}
    write_json(path / "zarr.json", group({"ome": ome, PROVENANCE: dict(facts)}))
    chunks = tuple(min(CHUNK, side) for side in values.shape)
    array = zarr.create_array(
        path / "0", shape=values.shape, dtype="float32", chunks=chunks, dimension_names=("y", "x"), overwrite=True
    )
    array[:] = values


def _multiscale(name: str, stride: int, mpp: tuple[float, float] | None) -> dict[str, Any]:
    unit = {} if mpp is None else {"unit": "micrometer"}
    height, width = (1.0, 1.0) if mpp is None else mpp
    first = (stride - 1) / 2  # the centre of a position's pixels
    return {
        "name": name,
        "axes": [{"name": axis, "type": "space", **unit} for axis in "yx"],
        "datasets": [
            {
                "path": "0",
                "coordinateTransformations": [
                    {"type": "scale", "scale": [height * stride, width * stride]},
                    {"type": "translation", "translation": [height * first, width * first]},
                ],
            }
        ],
    }
