"""The metadata of an OME-Zarr image that viewers lay over the slide."""

from __future__ import annotations

from typing import Any

from wsi_trainer.slide.geometry import SlideTransform


def multiscale(name: str, place: SlideTransform, levels: int = 1) -> dict[str, Any]:
    """What NGFF 0.4 and 0.5 alike say of an image with the axes y and x, in the coordinates of the original slide.

    Args:
        name: Of the image.
        place: Where it lies in the slide. Without micrometres the unit of the axes is one of the slide's pixels.
        levels: The image itself, and coarser ones, each with half the pixels along each side.
    """
    unit = {} if place.mpp is None else {"unit": "micrometer"}
    places = [place.coarser(2**level) for level in range(levels)]
    return {
        "name": name,
        "axes": [{"name": axis, "type": "space", **unit} for axis in "yx"],
        "datasets": [
            {
                "path": str(level),
                "coordinateTransformations": [
                    {"type": "scale", "scale": list(its.pixel())},
                    {"type": "translation", "translation": list(its.first())},
                ],
            }
            for level, its in enumerate(places)
        ],
    }
