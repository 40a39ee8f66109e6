"""What a file says of the patches of a slide, and where they lie in an image of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.slide.errors import SlideError
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.views import Positions

SAME_SIZE = 0.15
"""By how much of its side a patch may be larger or smaller than a file says: scanners that are all said to have 20x
differ by so much, and the next magnification by a factor of 2.
"""


@dataclass(frozen=True, eq=False)
class Chosen:
    """Patches of one slide, in pixels of its level 0."""

    path: Path
    """The file that says them."""
    points: NDArray[np.float64]
    """x and y of each."""
    middle: bool
    """Whether points are the middles of patches, and not their upper left corners."""
    side: float | None = None
    """Pixels along a side of a patch, where the file says it."""
    slide: tuple[int, int] | None = None
    """Height and width of level 0 of the slide that they were made for, where the file says it."""

    def positions(self, place: SlideTransform, shape: tuple[int, int], size: int) -> Positions:
        """The corners of patches of this size in an image of the slide, their middles where the file has them.

        Raises:
            SlideError: They are of another slide, of another size, or lie outside.
        """
        if not len(self.points):
            raise SlideError(self.path, "has no patches; leave the slide out of the manifest, or choose some")
        if not np.isfinite(self.points).all():
            raise SlideError(self.path, "has a position that is no finite number; give pixels of level 0")
        if self.slide is not None and self.slide != place.shape:
            raise SlideError(
                self.path,
                f"was made for a slide of {self.slide[1]} × {self.slide[0]} pixels, and this one has "
                f"{place.shape[1]} × {place.shape[0]}; is it the file of another slide?",
            )
        own = size * sum(place.scale) / 2
        side = own if self.side is None else self.side
        if abs(side / own - 1) > SAME_SIZE:
            raise SlideError(
                self.path,
                f"has patches of {side:g} pixels of level 0, and those of data.patches (size {size}) have {own:g}; "
                "set data.patches.mpp to the resolution that they were made for, and size to their pixels there",
            )
        middles = self.points if self.middle else self.points + side / 2
        corners = np.floor(place.to_image(middles) - size / 2 + 0.5)[:, ::-1]
        outside = np.any((corners <= -size) | (corners >= shape), axis=1)
        if outside.any():
            x, y = self.points[outside][0]
            raise SlideError(
                self.path,
                f"{int(outside.sum())} of its {len(self.points)} patches lie outside of the slide's image, the first "
                f"at x {x:g}, y {y:g}; give pixels of level 0, from the upper left corner of the slide",
            )
        return corners.astype(np.int32)
