"""`Places`: where the patches of a slide lie. A bag has them with pixels, features without."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import SlideError
from wsi_trainer.slide.geometry import Pair, SlideTransform

SAME_SIZE = 0.15
"""By how much of its side a patch may be larger or smaller than a file says: scanners that are all said to have 20x
differ by so much, and the next magnification by a factor of 2.
"""


@dataclass(frozen=True, eq=False)
class Places:
    """Patches of one slide, in pixels of its level 0."""

    path: Path
    """The file that says them."""
    points: NDArray[np.float64]
    """x and y of each, in the order of the patches or features."""
    middle: bool = False
    """Whether points are the middles of patches, and not their upper left corners."""
    side: float | None = None
    """Pixels along a side of a patch, where the file says it."""
    slide: tuple[int, int] | None = None
    """Height and width of level 0 of the slide that they were made for, where the file says it."""
    pixels: int | None = None
    """Pixels along a side of a patch as its encoder takes it, where the file says them."""
    micrometres: bool = False
    """Whether all numbers are micrometres instead of pixels, as in the files of STAMP."""

    def __len__(self) -> int:
        return len(self.points)

    @property
    def spacing(self) -> float:
        """The distance of neighbours that is most common along rows and columns: the side of patches side by side.

        Raises:
            SlideError: No two of them are in one row or column.
        """
        found: Counter[float] = Counter()
        for along, across in ((0, 1), (1, 0)):
            ordered = self.points[np.lexsort((self.points[:, along], self.points[:, across]))]
            steps = np.diff(ordered, axis=0)
            found.update(steps[(steps[:, across] == 0) & (steps[:, along] > 0), along].tolist())
        if not found:
            raise SlideError(self.path, "says nothing of the size of its patches, and no two of them are in one row")
        return found.most_common(1)[0][0]

    @property
    def in_patches(self) -> NDArray[np.float64]:
        """x and y of the upper left corner of each patch, in sides of a patch.

        Raises:
            SlideError: Nothing says how large they are.
        """
        side = self.side or self.spacing
        return self.points / side - (0.5 if self.middle else 0.0)

    def in_pixels(self, mpp: Pair | None) -> Places:
        """The same in pixels of level 0, of which each has this size, y and x in micrometres.

        Raises:
            SlideError: They are in micrometres, and the size is not known.
        """
        if not self.micrometres:
            return self
        if mpp is None:
            raise SlideError(
                self.path,
                "counts in micrometres, and the slide does not say how large its pixels are; fill in the manifest's "
                "column mpp",
            )
        side = None if self.side is None else self.side * 2 / (mpp[0] + mpp[1])
        return replace(self, points=self.points / mpp[::-1], side=side, micrometres=False)

    def in_micrometres(self, mpp: Pair) -> Places:
        """The same in micrometres, of pixels of level 0 of this size, y and x."""
        side = None if self.side is None else self.side * (mpp[0] + mpp[1]) / 2
        return replace(self, points=self.points * mpp[::-1], side=side, micrometres=True)

    def positions(self, place: SlideTransform, shape: tuple[int, int], size: int) -> NDArray[np.int32]:
        """The corners of patches of this size in an image of the slide, their middles where the file has them.

        Raises:
            SlideError: They are of another slide, of another size, or lie outside.
        """
        its = self.in_pixels(place.mpp)
        if not len(its.points):
            raise SlideError(its.path, "has no patches; leave the slide out of the manifest, or choose some")
        if not np.isfinite(its.points).all():
            raise SlideError(its.path, "has a position that is no finite number; give pixels of level 0")
        if its.slide is not None and its.slide != place.shape:
            raise SlideError(
                its.path,
                f"was made for a slide of {its.slide[1]} × {its.slide[0]} pixels, and this one has "
                f"{place.shape[1]} × {place.shape[0]}; is it the file of another slide?",
            )
        own = size * sum(place.scale) / 2
        side = own if its.side is None else its.side
        if abs(side / own - 1) > SAME_SIZE:
            raise SlideError(
                its.path,
                f"has patches of {side:g} pixels of level 0, and those of data.patches (size {size}) have {own:g}; "
                "set data.patches.mpp to the resolution that they were made for, and size to their pixels there",
            )
        middles = its.points if its.middle else its.points + side / 2
        corners = np.floor(place.to_image(middles) - size / 2 + 0.5)[:, ::-1]
        outside = np.any((corners <= -size) | (corners >= shape), axis=1)
        if outside.any():
            x, y = its.points[outside][0]
            raise SlideError(
                its.path,
                f"{int(outside.sum())} of its {len(its.points)} patches lie outside of the slide's image, the first "
                f"at x {x:g}, y {y:g}; give pixels of level 0, from the upper left corner of the slide",
            )
        return corners.astype(np.int32)
