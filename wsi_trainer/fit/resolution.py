"""Resolution of a run: other slides are shown to its network with pixels as large as those it was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from rich.console import Console

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.splits import first_names
from wsi_trainer.errors import UserError
from wsi_trainer.io.display import say
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.slide.errors import SlideError
from wsi_trainer.slide.geometry import PROVENANCE, TOLERANCE, is_plausible
from wsi_trainer.slide.slide import Slide

MIXED = 1.1
"""Largest ratio between pixels of slides that are taken for one resolution."""


@dataclass(frozen=True)
class Seen:
    """Slides as a network was trained on them, before `data.downsample`."""

    finest: float | None
    """Least size of a pixel in micrometres; None where a slide does not say it."""
    coarsest: float | None
    """Greatest size of a pixel in micrometres."""
    painted: bool
    """Whether they were stores with `--background constant`."""

    @classmethod
    def of(cls, records: Sequence[SlideRecord]) -> Self:
        """Read the headers of these slides; those that cannot be opened say nothing."""
        opened = [(_pixel(slide), _painted(slide)) for _, slide in _opened(records)]
        sizes = [pixel for pixel, _ in opened if pixel is not None]
        known = bool(sizes) and len(sizes) == len(opened)
        painted = any(painted for _, painted in opened)
        return cls(min(sizes) if known else None, max(sizes) if known else None, painted)

    @property
    def mixed(self) -> bool:
        """True where its slides are of different resolutions."""
        return self.finest is not None and self.coarsest is not None and self.coarsest > MIXED * self.finest

    def __str__(self) -> str:
        if self.finest is None or self.coarsest is None:
            return "an unknown size of pixels"
        one = self.coarsest <= self.finest * (1 + TOLERANCE)
        return f"{self.finest:.3g} µm a pixel" if one else f"{self.finest:.3g} to {self.coarsest:.3g} µm a pixel"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)

    def show(self, records: Sequence[SlideRecord], tell: bool = True) -> list[SlideRecord]:
        """The records of other slides, finer ones to be shrunk to this resolution.

        Args:
            records: The slides.
            tell: Whether to print which are.

        Raises:
            UserError: A slide is coarser, or does not say how large its pixels are.
        """
        factors: dict[str, float] = {}
        finer, raw = [], []
        for record, slide in _opened(records):
            if self.painted and not _painted(slide):
                raw.append(record.slide)
            if (factor := self._factor(record, slide)) > 1:
                factors[record.slide] = factor
                finer.append(f"{record.slide} has {_pixel(slide):.3g}")
        lines = []
        if finer:
            lines.append(f"{len(finer)} slides are read at {self}, as those of training: {first_names(finer)}")
        if self.finest is None:
            lines.append("the run's slides do not say how large their pixels are: these are read as they are")
        if raw:
            lines.append(
                f"{len(raw)} slides have their own background; that of the run's stores is white: convert them with "
                f"`wsi-train preprocess --background constant` to compare: {first_names(raw)}"
            )
        for line in lines if tell else ():
            say(Console(), line)
        return [replace(record, shrink=factors.get(record.slide, 1.0)) for record in records]

    def _factor(self, record: SlideRecord, slide: Slide) -> float:
        """Pixels of the slide's level 0 along one pixel of this resolution."""
        pixel = _pixel(slide)
        if self.finest is None or self.coarsest is None:
            return 1.0
        if pixel is None:
            raise UserError(
                f"slide {record.slide} does not say how large its pixels are, and the run was trained at {self}; give "
                "a manifest with the column mpp"
            )
        if pixel > self.coarsest * (1 + TOLERANCE):
            raise UserError(
                f"slide {record.slide} has {pixel:.3g} µm a pixel, and the run was trained at {self}, which is finer; "
                "leave the slide out, or train a run at its resolution"
            )
        return slide.factor(self.finest) if pixel < self.finest else 1.0


def _opened(records: Sequence[SlideRecord]) -> Iterator[tuple[SlideRecord, Slide]]:
    """The slides one after the other; those that cannot be opened are left to whoever reads their pixels."""
    for record in records:
        try:
            slide = Slide.open(record.path, mpp=record.mpp, name=record.slide)
        except SlideError:
            continue
        with slide:
            yield record, slide


def _pixel(slide: Slide) -> float | None:
    """Micrometres along a side of a pixel of level 0, where something plausible says it."""
    return None if slide.mpp is None or not all(map(is_plausible, slide.mpp)) else sum(slide.mpp) / 2


def _painted(slide: Slide) -> bool:
    """True for a store whose background was painted white."""
    if not slide.stored:
        return False
    settings = read_json(slide.path / "zarr.json")["attributes"].get(PROVENANCE, {}).get("settings", {})
    return bool(settings.get("background") == "constant")
