"""What rules found on a slide as a picture that lies over its thumbnail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from wsi_trainer.drawn import save_picture
from wsi_trainer.slides.rules.table import ROWS
from wsi_trainer.slides.tissue import TissueMask

SUFFIX = ".rules.png"


def draw_overlay(mask: TissueMask, path: Path) -> None:
    """Saves a picture with a pixel for each of the mask: each rule in its colour, and clear elsewhere."""
    numbers = np.zeros(mask.mask.shape, np.uint8)
    for number, row in enumerate(ROWS, start=1):
        if row.name in mask.found:
            numbers[mask.found[row.name]] = number
    picture = Image.fromarray(numbers, "P")
    picture.putpalette([value for colour in ((0, 0, 0), *(row.colour for row in ROWS)) for value in colour])
    save_picture(picture, path, "PNG", transparency=0, optimize=True)
