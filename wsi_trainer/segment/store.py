"""Predicted classes as an OME label image that is written block by block."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zarr

from wsi_trainer.regions import Placement
from wsi_trainer.segment.outlines import COLOURS
from wsi_trainer.slides.store.metadata import NGFF, group, write_json

CHUNK = 512


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
