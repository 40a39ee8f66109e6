"""The place that a store's metadata say, also that of stores which were written before it was kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wsi_trainer.foreign import read_json
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.store.metadata import PROVENANCE

from .place import Place

KEY = "place"
"""The key of a store's provenance."""
_NEAR = 1e-4
"""Within this of a whole number, a slide's own level was taken as it is and not filtered."""


def place_of_store(path: Path) -> Place:
    """Where level 0 of a store lies in the slide that it was made from.

    A store that says nothing of a slide is itself the slide.

    Raises:
        SlideError: Its zarr.json says something that cannot be understood.
    """
    try:
        attributes = read_json(path / "zarr.json")["attributes"]
        scales = attributes["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"]
        mpp = (float(scales[-2]), float(scales[-1]))
        known = attributes.get(PROVENANCE) or {}
        if KEY in known:
            return Place.of(known[KEY])
        shape = read_json(path / "0" / "zarr.json")["shape"][-2:]
        own = (int(shape[0]), int(shape[1]))
        return _guessed(known, own, mpp) if "source_mpp" in known else Place(own, mpp=mpp)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise SlideError(
            path, "damaged: zarr.json does not say where in the slide the store lies; convert the slide again"
        ) from error


def _guessed(known: Mapping[str, Any], own: tuple[int, int], mpp: tuple[float, float]) -> Place:
    """The place of a store that keeps only what its pixels measure, to within a pixel and a half of the store.

    Its resolution was written as wanted. Where that is nearly a whole number of the slide's pixels, a level of the
    slide may have been taken, which has exactly that number: the size of the store tells.
    """
    source = (float(known["source_mpp"]["y"]), float(known["source_mpp"]["x"]))
    part, origin = known["source_shape"], known.get("source_origin", [0, 0])
    scale = []
    for axis in (0, 1):
        step = mpp[axis] / source[axis]
        whole = max(1, round(step))
        near = abs(step / whole - 1) < _NEAR
        scale.append(float(whole) if near and own[axis] != round(part[axis] / step) else step)
    if all(abs(step - 1) < _NEAR for step in scale):
        scale = [1.0, 1.0]
    top, left = (float(start) for start in origin)
    # Of a store that was cropped, the whole canvas is not known: what it shows ends where the slide ends, at least.
    return Place((int(top) + int(part[0]), int(left) + int(part[1])), (top, left), (scale[0], scale[1]), source)
