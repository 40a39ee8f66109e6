"""A cohort of slides: its list and hashes in a folder, its resolution, what a run knows of it, where its files are."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from wsi_trainer.data.manifest import PATHS, SlideRecord, check_files, write_manifest
from wsi_trainer.data.splits import first_names, read_splits
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.display import clean, say
from wsi_trainer.io.files import as_written, read_json, write_json
from wsi_trainer.slide.geometry import TOLERANCE, Resolution
from wsi_trainer.slide.identity import KnownSlides, SlideId
from wsi_trainer.slide.names import same_path, same_patient, spellings

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
        """Describe these slides."""
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


@dataclass(frozen=True)
class KeptSlides:
    """The slides that a run, or one of its cohorts, keeps: `splits.csv` lists them, `run.json` has their hashes."""

    folder: Path
    root: Path | None = None
    """The folder that holds the slides now, if they were moved."""

    @property
    def splits(self) -> Path:
        return self.folder / "splits.csv"

    @property
    def facts(self) -> Path:
        return self.folder / "run.json"

    def records(self, columns: Sequence[str] = (), filled: bool = False) -> list[SlideRecord]:
        """The slides with their splits, where their files are now.

        Args:
            columns: The columns with the label; without any, slides need no label.
            filled: Whether none of these may be empty.
        """
        records = read_splits(self.splits, columns, filled)
        return records if self.root is None else moved(records, self.root)

    def identities(self) -> dict[str, SlideId]:
        """Hashes of each slide; none of a cohort of 1.0."""
        files = {record.slide: record.path for record in self.records()}
        with as_written(self.facts):
            slides = dict(read_json(self.facts).get("slides", {}))
            return {name: SlideId.read(one, files[name]) for name, one in slides.items() if name in files}

    @property
    def seen(self) -> Seen | None:
        """The resolution of those that were trained on; runs on features, and of older versions, do not keep it."""
        with as_written(self.facts):
            seen = read_json(self.facts).get("seen")
            return None if seen is None else Seen(**seen)

    def freeze(
        self, records: Sequence[SlideRecord], features: Path | None = None, seen: bool = False, tell: bool = False
    ) -> None:
        """Keep these slides with their splits, and the hashes of their files.

        Args:
            records: The slides.
            features: The folder of the features that are read instead of the slides.
            seen: Whether to keep the resolution of those of the split train.
            tell: Whether to print what a user should know of the files.

        Raises:
            UserError: The same slide is in two splits, under two names.
        """
        slides = {record.slide: record.identity(features) for record in records}
        check_copies(records, slides)
        write_manifest(self.splits, records)
        facts: dict[str, Any] = {"schema": 2, "slides": {name: slide.record() for name, slide in slides.items()}}
        headers = read_headers(records) if tell and features is None else []
        if seen:
            shown = Seen.of([header for header in headers if header.record.split == "train"])
            facts["seen"] = shown.to_dict()
            if shown.mixed:
                log.warning(
                    "the slides of the split train have %s, and each is shown as it is; convert them with "
                    "`wsi-train preprocess --mpp` to show them at one resolution", shown,
                )  # fmt: skip
        write_json(self.facts, facts)

    def check_files(self, records: Sequence[SlideRecord]) -> None:
        """Refuse slides that are gone."""
        absent = [record for record in records if not record.path.exists()]
        if absent:
            raise UserError(
                f"{len(absent)} of {len(records)} slides are missing, the first is {absent[0].path}; if they were "
                f"moved, give --data-root, the folder that now holds what was in {common_folder(records)} (of fit: "
                "--data.stores or --data.root)"
            )
        check_files(records)

    def replaced(self, records: Sequence[SlideRecord], features: Path | None = None) -> SlideRecord | None:
        """The first slide that is another one than it was when it was kept.

        Args:
            records: The slides.
            features: The folder of the features that are read instead of the slides.
        """
        known = self.identities()
        for record in records:
            one = known.get(record.slide, SlideId())
            if not one.content or (features is not None and one.content == one.hash):  # 1.0 hashed no features
                continue
            now = record.identity(features).content
            if now and now != one.content:  # whoever reads the features says that they are absent
                return record
        return None

    def are(self, records: Sequence[SlideRecord], features: Path | None = None) -> bool:
        """True where these are the slides that are kept, or some of them, or further ones with them."""
        before, now = {record.slide for record in self.records()}, {record.slide for record in records}
        return (before <= now or now <= before) and self.replaced(records, features) is None


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

    def others(self, records: Sequence[SlideRecord], features: Path | None = None) -> list[SlideRecord]:
        """The slides that are none of these; those that are, and patients that are called alike, are named.

        Args:
            records: The slides.
            features: The folder of the features that are read instead of the slides.
        """
        left: dict[tuple[str, bool], list[str]] = defaultdict(list)
        others = []
        for record in records:
            if (found := self.find(record, features)) is None:
                others.append(record)
            else:
                left[found].append(record.slide)
        for (split, by_name), slides in left.items():
            why = ", by their names, since there is no file on both sides to compare" if by_name else ""
            say(
                Console(),
                f"{len(slides)} slides were in the split {split} of the run{why}, left out: {first_names(slides)}",
            )
        if not others:
            raise UserError(f"the run was trained on all {len(records)} slides of this cohort; give other slides")
        own = {same_patient(record.patient) for record in self.records}
        if patients := {record.patient for record in others if same_patient(record.patient) in own}:
            say(
                Console(),
                f"{len(patients)} patients are called like patients that the run was trained on: "
                f"{first_names(sorted(patients))}; leave their slides out if they are the same persons",
            )
        return others

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
    return {same_path(record.path), *(name for one in record.called for name in spellings(one))}


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
