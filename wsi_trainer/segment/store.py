"""Predicted classes as an OME label image that is written block by block."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from wsi_trainer.regions import Placement
from wsi_trainer.segment.outlines import COLOURS
from wsi_trainer.slides.store.metadata import NGFF, group, write_json

CHUNK = 512
BAND = 4096
"""Rows that are halved at a time; even, so that each band begins a pixel of the next level."""


def create_labels(
    path: Path, size: tuple[int, int], classes: Sequence[str], mpp: tuple[float, float] | None, place: Placement
) -> Any:
    """An empty NGFF 0.5 label, an earlier one replaced; returns its array (height, width) of the classes' places.

    Args:
        path: The store.
        size: Height and width of the image.
        classes: Their names; the first is background, which takes no space.
        mpp: Micrometres for a pixel of the image, y and x; without it the unit of the axes is that pixel.
        place: Where the image lies in its slide.
    """
    shutil.rmtree(path, ignore_errors=True)
    height, width = (1.0, 1.0) if mpp is None else mpp
    unit = {} if mpp is None else {"unit": "micrometer"}
    (x, y), (across, down) = place.origin, place.scale
    steps: list[dict[str, Any]] = [{"type": "scale", "scale": [height, width]}]
    if x or y:
        steps.append({"type": "translation", "translation": [y / down * height, x / across * width]})
    label = {
        "version": NGFF,
        "colors": [
            {"label-value": number, "rgba": [*COLOURS[(number - 1) % len(COLOURS)], 255]}
            for number in range(1, len(classes))
        ],
        "properties": [{"label-value": number, "class": name} for number, name in enumerate(classes)],
    }
    multiscale = {
        "name": path.name.split(".")[0],
        "axes": [{"name": axis, "type": "space", **unit} for axis in "yx"],
        "datasets": [{"path": "0", "coordinateTransformations": steps}],
    }
    write_json(path / "zarr.json", group({"ome": {"version": NGFF, "multiscales": [multiscale], "image-label": label}}))
    chunks = (min(CHUNK, size[0]), min(CHUNK, size[1]))
    return zarr.create_array(path / "0", shape=size, dtype="uint8", chunks=chunks, dimension_names=("y", "x"))


def add_levels(path: Path) -> None:
    """Coarser levels beside level 0, each half of the one before, until one fits a chunk.

    A pixel has the label of the upper left of the four it stands for, since labels have no mean. Half a pixel lies
    between their centres and its own, which the translation says.
    """
    content = json.loads((path / "zarr.json").read_bytes())
    datasets = content["attributes"]["ome"]["multiscales"][0]["datasets"][:1]
    finer: Any = zarr.open_array(path / "0", mode="r")
    level = 0
    while max(finer.shape) > CHUNK:
        level += 1
        size = tuple(-(-side // 2) for side in finer.shape)
        coarser: Any = zarr.create_array(
            path / str(level), shape=size, dtype="uint8", chunks=tuple(min(CHUNK, side) for side in size),
            dimension_names=("y", "x"), overwrite=True,
        )  # fmt: skip
        for top in range(0, finer.shape[0], BAND):
            part = np.asarray(finer[top : top + BAND])[::2, ::2]
            coarser[top // 2 : top // 2 + len(part)] = part
        datasets.append({"path": str(level), "coordinateTransformations": _shrunk(datasets[0], 2**level)})
        finer = coarser
    content["attributes"]["ome"]["multiscales"][0]["datasets"] = datasets
    write_json(path / "zarr.json", content)


def _shrunk(first: dict[str, Any], times: int) -> list[dict[str, Any]]:
    """The scale and the place of a level: the centre of its first pixel is that of the pixels it stands for."""
    steps = {step["type"]: step[step["type"]] for step in first["coordinateTransformations"]}
    scale, place = steps["scale"], steps.get("translation", [0.0, 0.0])
    return [
        {"type": "scale", "scale": [step * times for step in scale]},
        {"type": "translation", "translation": [at + step * (times - 1) / 2 for at, step in zip(place, scale)]},
    ]
