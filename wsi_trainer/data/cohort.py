"""A cohort of slides: which of them a run knows already, at which resolution it saw them, where their files are now."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from wsi_trainer.data.manifest import PATHS, SlideRecord
from wsi_trainer.data.splits import first_names
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.display import clean, say
from wsi_trainer.slide.geometry import TOLERANCE, Resolution
from wsi_trainer.slide.identity import KnownSlides, SlideId
from wsi_trainer.slide.names import same_path, slide_name

log = logging.getLogger("wsi_trainer")

MIXED = 1.1
"""Largest ratio between pixels of slides that are taken for one resolution."""


@dataclass(frozen=True)
class Header:
    """Facts of a slide that are known without its pixels."""

    record: SlideRecord
    resolution: Resolution | None
    painted: bool
    """Whether it is a store with `--background constant`."""


def read_headers(records: Sequence[SlideRecord], tell: bool = True) -> list[Header]:
    """Read the headers of slides; those that cannot be opened are left to whoever reads their pixels.

    Args:
        records: The slides.
        tell: Whether to print what a user should know of the files, such as two sizes of a pixel in one: each thing
            once, with the slides of which it is true. Where the manifest has the size of a pixel, that is what counts.
    """
    headers, noted = [], defaultdict[str, list[str]](list)
    for record in records:
        try:
            slide = record.open()
        except SlideError:
            continue
        with slide:
            headers.append(Header(record, slide.resolution, slide.painted))
            for note in slide.info.notes if record.mpp is None else ():
                noted[note].append(record.slide)
    for note, slides in noted.items() if tell else ():
        log.warning("%s: %s", clean(first_names(slides)), note)
    return headers


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
    def of(cls, headers: Sequence[Header]) -> Self:
        """What these slides are."""
        sizes = [header.resolution.mean for header in headers if header.resolution is not None]
        known = bool(sizes) and len(sizes) == len(headers)
        painted = any(header.painted for header in headers)
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
        headers = read_headers(records, tell)
        if self.finest is not None:
            for header in headers:
                self._check(header)
        if tell:
            self._tell(headers)
        return [replace(record, finest=self.finest) for record in records]

    def _check(self, header: Header) -> None:
        slide = header.record.slide
        if header.resolution is None:
            raise UserError(
                f"slide {slide} does not say how large its pixels are, and the run was trained at {self}; give a "
                "manifest with the column mpp"
            )
        if self.coarsest is not None and header.resolution.mean > self.coarsest * (1 + TOLERANCE):
            raise UserError(
                f"slide {slide} has {header.resolution.mean:.3g} µm a pixel, and the run was trained at {self}, which "
                "is finer; leave the slide out, or train a run at its resolution"
            )

    def _tell(self, headers: Sequence[Header]) -> None:
        finer = [
            f"{header.record.slide} has {header.resolution.mean:.3g}"
            for header in headers
            if self.finest is not None and header.resolution is not None
            if self.finest > header.resolution.mean * (1 + TOLERANCE)
        ]
        raw = [header.record.slide for header in headers if self.painted and not header.painted]
        if finer:
            say(Console(), f"{len(finer)} slides are read at {self}, as those of training: {first_names(finer)}")
        if self.finest is None:
            say(Console(), "the run's slides do not say how large their pixels are: these are read as they are")
        if raw:
            say(
                Console(),
                f"{len(raw)} slides have their own background; that of the run's stores is white: convert them with "
                f"`wsi-train preprocess --background constant` to compare: {first_names(raw)}",
            )


class Trained:
    """Slides that a run was trained on, or that chose its checkpoint."""

    def __init__(self, records: Sequence[SlideRecord], identities: Mapping[str, SlideId]) -> None:
        """Know slides by their hashes, and by their names and paths.

        Args:
            records: The slides.
            identities: Their hashes.
        """
        self.records = records
        self._ids = identities
        self._known = KnownSlides()
        self._split: dict[str, str] = {}
        self._called: dict[str, list[str]] = defaultdict(list)
        for record in records:
            self._split[record.slide] = record.split
            self._known.add(record.slide, identities.get(record.slide, SlideId()))
            for name in _called(record):
                self._called[name].append(record.slide)

    def find(self, record: SlideRecord, features: Path | None) -> tuple[str, bool] | None:
        """The split of a slide, and whether only its name or path tells; None of one that is not among these."""
        slide = record.identity(features)
        if (found := self._known.find(slide)) is not None:
            return self._split[found], False
        for name in _called(record):
            for same in self._called.get(name, ()):
                if not slide.is_comparable(self._ids.get(same, SlideId())):
                    return self._split[same], True
        return None


def _called(record: SlideRecord) -> set[str]:
    return {same_path(record.path), slide_name(record.slide), slide_name(record.path)}


def check_copies(records: Sequence[SlideRecord], slides: Mapping[str, SlideId]) -> None:
    """Refuse a slide that is in two splits under two names; one that is twice in a split is named."""
    known, first = KnownSlides(), {record.slide: record for record in records}
    for other in records:
        slide = slides[other.slide]
        if (name := known.find(slide)) is None:
            known.add(other.slide, slide)
            continue
        one = first[name]
        if other.split != one.split:
            raise UserError(
                f"{one.slide} in {one.split} and {other.slide} in {other.split} are one slide under two names: "
                "their checksums are the same; take one of the two lines out of the manifest"
            )
        say(Console(), f"{one.slide} and {other.slide} are one slide under two names, both in {one.split}")


def moved(records: Sequence[SlideRecord], root: Path) -> list[SlideRecord]:
    """The records with their files in another folder, below which they lie as they did below their common one."""
    before = common_folder(records)

    def there(path: Path) -> Path:
        return root / path.relative_to(before) if path.is_relative_to(before) else path

    def cells(others: Mapping[str, str]) -> dict[str, str]:
        return {key: str(there(Path(cell))) if key in PATHS and cell else cell for key, cell in others.items()}

    return [replace(record, path=there(record.path), others=cells(record.others)) for record in records]


def common_folder(records: Sequence[SlideRecord]) -> Path:
    """The innermost folder that holds all slides."""
    return Path(os.path.commonpath([record.path.parent for record in records]))
