"""Comparison of a store with its slide: changes made on purpose, and boxes read again from both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from wsi_trainer.slide.errors import SlideError
from wsi_trainer.slide.resample import ScaledImage
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.chunks import StoredLevel
from wsi_trainer.store.settings import Settings

_BOXES = 16


class OtherPixels(SlideError):
    """A store that was just written does not hold what its slide does."""


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison of a store with its slide.

    Attributes:
        changes: what was done to pixels on purpose; nothing where they are those of the file.
        boxes: how many boxes were read again from both and found to be equal.
        pixels: and how many pixels.
    """

    changes: tuple[str, ...]
    boxes: int
    pixels: int

    def record(self) -> dict[str, Any]:
        """The entries that the store keeps."""
        compared = {"boxes": self.boxes, "pixels": self.pixels}
        return {"exact": self.pixels > 0, "changes": list(self.changes), "compared": compared}


def compare(slide: Slide, image: ScaledImage, stored: StoredLevel, settings: Settings) -> Comparison:
    """Reads boxes of a slide and of the finest level of its store again, unless pixels were changed on purpose.

    Raises:
        OtherPixels: They differ.
    """
    changes = tuple(_changes(slide, image, settings))
    if changes:
        return Comparison(changes, 0, 0)
    boxes = list(_boxes(stored))
    for y, x, height, width in boxes:
        if not np.array_equal(stored.read(y, x, height, width), image.read(y, x, height, width).transpose(2, 0, 1)):
            raise OtherPixels(
                slide.path,
                f"the store has other pixels than the slide, in {height} x {width} px from row {y}, column {x}: the "
                "file changed while it was read, or the memory or disk is bad; run again",
            )
    return Comparison((), len(boxes), sum(height * width for _, _, height, width in boxes))


def _changes(slide: Slide, image: ScaledImage, settings: Settings) -> Iterator[str]:
    yield from slide.info.changes
    if not image.is_exact:
        yield f"filtered to {settings.mpp} µm a pixel"
    elif image.level:
        yield f"level {image.level} of the slide"
    if settings.background != "keep":
        yield "background painted in one colour"


def _boxes(stored: StoredLevel) -> Iterator[tuple[int, int, int, int]]:
    """Chunks of the image: its corners, and others that are drawn by lot, the same each time."""
    size = stored.layout.chunk
    rows, columns = -(-stored.shape[0] // size), -(-stored.shape[1] // size)
    lot = np.random.Generator(np.random.Philox(key=[rows, columns]))
    cells = [(row, column) for row in (0, rows - 1) for column in (0, columns - 1)]
    cells += [(int(lot.integers(rows)), int(lot.integers(columns))) for _ in range(_BOXES - len(cells))]
    for row, column in dict.fromkeys(cells):
        y, x = row * size, column * size
        yield y, x, min(size, stored.shape[0] - y), min(size, stored.shape[1] - x)
