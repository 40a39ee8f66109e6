"""Size of a pixel: explicit before manifest before metadata; never guessed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wsi_trainer.slide.errors import AbsentResolution, UnknownResolution
from wsi_trainer.slide.formats.base import SlideInfo

PLAUSIBLE = (0.05, 20.0)
"""Micrometres per pixel of level 0 that a slide scanner can have: 72 dpi of an image editor is 353."""

TOLERANCE = 0.02
"""A slide within this of the wanted resolution is taken as it is: filtering would only blur it."""


@dataclass(frozen=True)
class Resolution:
    """Micrometres per pixel of level 0 and where the number comes from."""

    y: float
    x: float
    origin: str

    @property
    def mean(self) -> float:
        return (self.y + self.x) / 2

    @property
    def is_square(self) -> bool:
        """True if pixels are as high as wide."""
        return abs(self.y / self.x - 1) <= TOLERANCE


def resolve(
    path: Path | str, info: SlideInfo, explicit: float | None = None, manifest: float | None = None
) -> Resolution:
    """The resolution of a slide.

    Args:
        path: Named in the error.
        info: What the file says.
        explicit: Given by the user for this run; wins.
        manifest: From the manifest's column `mpp`.

    Raises:
        UnknownResolution: Nothing plausible is known.
    """
    for value, origin in ((explicit, "explicit"), (manifest, "manifest")):
        if value is not None:
            if not is_plausible(value):
                raise UnknownResolution(path, f"mpp {value:g} ({origin}) is implausible; {_expected()}")
            return Resolution(value, value, origin)
    way_out = "add a column mpp to the manifest or give --source_mpp"
    if info.mpp is None and info.unreadable is not None:
        raise UnknownResolution(path, f"the file says {info.unreadable!r} of the size of a pixel; {way_out}")
    if info.mpp is None:
        raise UnknownResolution(path, f"the file does not say how large a pixel is; {way_out}")
    if not all(map(is_plausible, info.mpp)):
        found = f"{info.mpp[0]:g} x {info.mpp[1]:g} µm"
        raise UnknownResolution(path, f"the file says that a pixel is {found}, {_expected()}; {way_out}")
    return Resolution(*info.mpp, "metadata")


def is_plausible(mpp: float) -> bool:
    """True for a resolution that a scanner can have."""
    return PLAUSIBLE[0] <= mpp <= PLAUSIBLE[1]


def _expected() -> str:
    return f"which is not between {PLAUSIBLE[0]:g} and {PLAUSIBLE[1]:g} µm"


def shrink_factor(path: Path | str, own: Resolution, wanted: float) -> float:
    """Pixels of level 0 along one pixel of the wanted resolution; 1 where the slide's own is near enough."""
    if abs(wanted / own.mean - 1) <= TOLERANCE:
        return 1.0
    if wanted < own.mean:
        raise AbsentResolution(path, f"has {own.mean:g} µm a pixel; mpp {wanted:g} is finer and would invent pixels")
    return wanted / own.mean


def shrink_factors(path: Path | str, own: Resolution, wanted: float) -> tuple[float, float]:
    """Pixels of level 0, y and x, along one pixel of the wanted resolution, which is square also where they are not."""
    if own.is_square:
        factor = shrink_factor(path, own, wanted)
        return factor, factor
    sides = [Resolution(side, side, own.origin) for side in (own.y, own.x)]
    return shrink_factor(path, sides[0], wanted), shrink_factor(path, sides[1], wanted)
