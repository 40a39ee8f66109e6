"""`LaidPatches`: where patches lie in an image of their slide, to paint a value of each there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_trainer.data.features import FeatureSource
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.patches import PatchConfig
from wsi_trainer.errors import SlideError
from wsi_trainer.explain.attribution import Attribution
from wsi_trainer.explain.outputs import Peak
from wsi_trainer.slide.geometry import TOLERANCE, SlideTransform
from wsi_trainer.slide.places import Places
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Bag, Image, Positions

LEAST_STEP = 8
"""A position of a map is at least this part of a patch: places of patches that overlap at random may be a pixel apart.
"""


@dataclass(frozen=True, eq=False)
class LaidPatches:
    """Patches in an image of their slide, with its pixels or without."""

    corners: Positions
    """Row and column of each, in the order of the patches."""
    side: int
    """Pixels along a side of a patch."""
    stride: int
    """Pixels along a position of the map; at most `side`, so that each patch covers the middle of one at least."""
    size: tuple[int, int]
    """Height and width of the image."""
    place: SlideTransform
    """Position of the image in the slide."""

    @classmethod
    def of_bag(cls, bag: Bag, patches: PatchConfig) -> Self:
        """The patches of a bag: a position is from one patch of the grid to the next, or a patch if it has gaps."""
        return cls(bag.positions, bag.side, min(patches.step, patches.size), bag.size, bag.place)

    @classmethod
    def of_features(
        cls, features: FeatureSource, record: SlideRecord, slide: Slide | None
    ) -> tuple[Self, Image | None]:
        """The patches of a file of features, and the image of the slide at their resolution.

        Args:
            features: The file.
            record: The slide, whose size of a pixel counts where the slide is absent.
            slide: The slide; None where it is absent, and the file alone says where patches lie.

        Raises:
            SlideError: The file does not say where its patches lie, or is of another slide.
        """
        places = features.places
        own = _from_file(places, record) if slide is None else slide.transform
        places = places.in_pixels(own.mpp)
        assert places.side is not None
        side = places.side / (sum(own.scale) / 2)
        factor = side / places.pixels if places.pixels else 1.0
        factor = 1.0 if factor < 1 + TOLERANCE else factor
        image = None if slide is None else Image(slide, factor=factor)
        place = own.coarser(factor) if image is None else image.place
        height, width = own.shape
        size = (int(np.ceil(height / factor)), int(np.ceil(width / factor))) if image is None else image.size
        scale = sum(place.scale) / 2
        pixels = max(1, round(places.side / scale))
        step = max(_step(places, places.side), places.side / LEAST_STEP) / scale
        stride = max(1, min(int(step + 0.01), pixels))
        return cls(places.positions(place, size, pixels), pixels, stride, size, place), image

    def paint(self, values: Tensor) -> Attribution:
        """The map: the mean of the patches over the middle of each position, 0 where there is none.

        Args:
            values: A value for each patch.
        """
        rows, columns = (-(-side // self.stride) for side in self.size)
        total, count = np.zeros((rows, columns)), np.zeros((rows, columns))
        first = np.ceil(self.corners / self.stride - 0.5).astype(int)
        last = np.ceil((self.corners + self.side) / self.stride - 0.5).astype(int)
        for value, (top, left), (bottom, right) in zip(
            values.flatten().double().tolist(), np.maximum(first, 0).tolist(), last.tolist(), strict=True
        ):
            total[top:bottom, left:right] += value
            count[top:bottom, left:right] += 1
        mean = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
        return Attribution(torch.from_numpy(mean), self.stride)

    @property
    def covered(self) -> NDArray[np.bool_]:
        """The positions of the map that a patch covers."""
        return self.paint(torch.ones(len(self.corners))).values.numpy() > 0

    def best(self, values: Tensor, count: int) -> list[Peak]:
        """The patches with the largest positive values, no two of which overlap by more than half a side."""
        numbers = values.flatten().double().numpy()
        found: list[Peak] = []
        taken = np.empty((0, 2), np.int64)
        for number in np.argsort(-numbers, kind="stable").tolist():
            if len(found) == count or numbers[number] <= 0:
                break
            corner = self.corners[number].astype(np.int64)
            if (np.abs(taken - corner).max(axis=1) < self.side / 2).any():
                continue
            taken = np.vstack([taken, corner])
            row, column = ((corner + self.side // 2) // self.stride).tolist()
            lo, hi = np.maximum(corner, 0), np.minimum(corner + self.side, self.size)
            found.append(Peak(float(numbers[number]), (row, column), tuple(lo.tolist()), tuple(hi.tolist())))
        return found


def _from_file(places: Places, record: SlideRecord) -> SlideTransform:
    """The slide that a file of features speaks of: as large as it says, or as its patches reach."""
    mpp = None if record.mpp is None else (record.mpp, record.mpp)
    its = places.in_pixels(mpp)
    assert its.side is not None
    right, bottom = np.ceil(its.points.max(axis=0) + its.side).astype(int).tolist()
    return SlideTransform(its.slide or (bottom, right), mpp=mpp)


def _step(places: Places, side: float) -> float:
    """Pixels from one patch to the next, at most a side."""
    try:
        return min(places.spacing, side)
    except SlideError:  # no two of them are in one row or column
        return side
