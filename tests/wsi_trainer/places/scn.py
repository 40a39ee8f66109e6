"""A slide with a canvas larger than what was scanned, in Leica's format, which OpenSlide reads with bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile

NANOMETRES = 500
TILE = 128


def write_scn(path: Path, pixels: np.ndarray, corner: tuple[int, int], canvas: tuple[int, int]) -> None:
    """Write the pixels (y, x, RGB) as the scanned part of a canvas.

    Args:
        path: The file.
        pixels: What was scanned.
        corner: Where on the canvas, y and x in pixels of 0.5 µm.
        canvas: Its height and width.
    """
    levels = [pixels, pixels.reshape(pixels.shape[0] // 4, 4, -1, 4, 3).mean(axis=(1, 3)).round().astype(np.uint8)]
    height, width = pixels.shape[:2]
    dimensions = "".join(
        f'<dimension sizeX="{level.shape[1]}" sizeY="{level.shape[0]}" r="{r}" ifd="{r}"/>'
        for r, level in enumerate(levels)
    )
    view = {"sizeX": width, "sizeY": height, "offsetX": corner[1], "offsetY": corner[0]}
    place = " ".join(f'{key}="{value * NANOMETRES}"' for key, value in view.items())
    xml = (
        '<?xml version="1.0"?><scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01"><collection name="c" '
        f'sizeX="{canvas[1] * NANOMETRES}" sizeY="{canvas[0] * NANOMETRES}"><image name="i"><device model="m"/>'
        f'<pixels sizeX="{width}" sizeY="{height}">{dimensions}</pixels><view {place}/><scanSettings>'
        "<objectiveSettings><objective>20</objective></objectiveSettings><illuminationSettings>"
        "<illuminationSource>brightfield</illuminationSource></illuminationSettings></scanSettings></image>"
        "</collection></scn>"
    )
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level in levels:
            file.write(
                level, tile=(TILE, TILE), photometric="rgb", compression="deflate", metadata=None,
                description=xml if level is pixels else None, resolution=(1e7 / NANOMETRES,) * 2,
                resolutionunit="CENTIMETER",
            )  # fmt: skip
