"""A run: the folder of `wsi-train fit`, with all that later commands need to know.

`fit` freezes the config, the slides with their splits, the checksums of their files and the versions. Every other
command opens the run and reads them from there; the manifest that the run began with may have changed since. Results on
another cohort are in a folder of their own, `cohorts/NAME`, laid out like those of the run.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from wsi_trainer.data.manifest import PATHS, SlideRecord, check_files, read_manifest, write_manifest
from wsi_trainer.data.splits import changes_since, first_names, read_splits
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.display import clean, say
from wsi_trainer.io.files import Locked, lock, write_json
from wsi_trainer.io.untrusted import read_json as read_foreign
from wsi_trainer.slide.geometry import PROVENANCE, TOLERANCE
from wsi_trainer.slide.identity import KnownSlides, SlideId
from wsi_trainer.slide.names import same_path, same_patient, slide_name
from wsi_trainer.slide.slide import Slide

if TYPE_CHECKING:
    from torch import nn

    from wsi_trainer.data.dataset import DataConfig
    from wsi_trainer.fit.config import Loaded
    from wsi_trainer.fit.predictor import Predictor

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
        noted: dict[str, list[str]] = defaultdict(list)
        opened = [(_pixel(slide), _painted(slide)) for _, slide in _opened(records, noted)]
        _say_notes(noted)
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
        noted: dict[str, list[str]] = defaultdict(list)
        for record, slide in _opened(records, noted):
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
        if tell:
            _say_notes(noted)
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


def _opened(records: Sequence[SlideRecord], noted: dict[str, list[str]]) -> Iterator[tuple[SlideRecord, Slide]]:
    """The slides one after the other; those that cannot be opened are left to whoever reads their pixels.

    Args:
        records: The slides.
        noted: Is given what a user should know of the files, with the slides of which it is true.
    """
    for record in records:
        try:
            slide = Slide.open(record.path, mpp=record.mpp, name=record.slide)
        except SlideError:
            continue
        with slide:
            for note in slide.info.notes if record.mpp is None else ():
                noted[note].append(record.slide)
            yield record, slide


def _say_notes(noted: Mapping[str, Sequence[str]]) -> None:
    for note, slides in noted.items():
        log.warning("%s: %s", clean(first_names(slides)), note)


def _pixel(slide: Slide) -> float | None:
    """Micrometres along a side of a pixel of level 0, where something plausible says it."""
    return None if slide.resolution is None else slide.resolution.mean


def _painted(slide: Slide) -> bool:
    """True for a store whose background was painted white."""
    if not slide.stored:
        return False
    settings = read_foreign(slide.path / "zarr.json")["attributes"].get(PROVENANCE, {}).get("settings", {})
    return bool(settings.get("background") == "constant")


log = logging.getLogger("wsi_trainer")

PACKAGES = (
    "wsi-trainer", "torch", "pytorch-lightning", "torchmetrics", "numpy", "scikit-learn",
    "openslide-python", "tifffile", "zarr",
)  # fmt: skip


LESION_SCORES = "scores.json"
LESIONS = "lesions.csv"
MAPS = "heatmaps.json"
"""The list of maps in the folder of a method."""
SEGMENTS = "segments.json"
"""The list of slides in the folder of what `segment` found."""


class _File:
    """The path of a file or folder of a run: `run.config`."""

    def __init__(self, name: str, of_results: bool = False) -> None:
        """Name the file.

        Args:
            name: Its name.
            of_results: Whether a cohort has one of its own.
        """
        self.name, self.of_results = name, of_results

    def __get__(self, run: Run, kind: type[Run]) -> Path:
        return (run.results if self.of_results else run.path) / self.name


@dataclass(frozen=True)
class Run:
    """The folder of a run, and the names of its files.

    >>> run = Run.open("runs/first")             # doctest: +SKIP
    >>> run.predict("slide.svs")                 # doctest: +SKIP
    {'probability_normal': 0.03, 'probability_tumour': 0.97}
    """

    path: Path
    chosen: str = "best"
    """The checkpoint: best, last, or a path."""
    cohort: str | None = None
    """The cohort whose results are meant, instead of the run's own."""
    data_root: Path | None = None
    """The folder that holds the slides now, if they were moved."""
    overrides: tuple[str, ...] = ()
    """Keys of the config that a command changes, as words of the command line."""
    trust: bool = False
    """Whether the config may name code beyond this package, which opening the model then runs."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        checkpoint: str = "best",
        cohort: str | None = None,
        data_root: str | Path | None = None,
        overrides: Sequence[str] = (),
        trust: bool = False,
    ) -> Run:
        """Open a run that `fit` wrote.

        Args:
            path: The folder.
            checkpoint: best, last, or the path of another one.
            cohort: The name of a cohort that was tested; without it the run's own slides.
            data_root: The folder that holds the slides now, if they were moved.
            overrides: Keys of the config to change, such as `--train.budget=2GiB`.
            trust: Whether the config may name classes and functions beyond this package.
        """
        root = None if data_root is None else Path(data_root)
        if root is not None and not root.is_dir():
            raise UserError(f"--data-root is {root}; there is no such folder")
        run = cls(Path(path), checkpoint, cohort, root, tuple(overrides), trust).existing()
        if cohort is not None and not run.splits.is_file():
            known = ", ".join(name for name in run.cohorts if replace(run, cohort=name).splits.is_file()) or "none"
            again = "; give the command that made it again, with --overwrite" if cohort in run.cohorts else ""
            raise UserError(
                f"{path} has no list of the slides of cohort {cohort!r}{again}. It has the cohorts: {known}; "
                f"`wsi-train test {path} --cohort` adds one"
            )
        return run

    def existing(self) -> Run:
        """This run, or an error if the folder is not one of a run."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not the folder of a run: it has no {self.config.name}")
        return self

    @property
    def name(self) -> str:
        return self.path.resolve().name if self.cohort is None else f"{self.path.resolve().name}, {self.cohort}"

    # Files of the run.

    config = _File("config.yaml")
    environment = _File("environment.json")
    memory = _File("memory.json")
    plan = _File("plan.json")
    estimate = _File("estimate.json")
    pretrained = _File("pretrained.json")
    cross_validation = _File("cross_validation.json")
    cost = _File("cost.json")
    metrics = _File("metrics")
    log = _File("log.txt")
    status = _File("status.json")
    checkpoints = _File("checkpoints")

    # Files of the run's own results, or of a cohort's.

    @property
    def results(self) -> Path:
        return self.path if self.cohort is None else self.path / "cohorts" / self.cohort

    splits = _File("splits.csv", of_results=True)
    facts = _File("run.json", of_results=True)
    """Checksums of the slides, and at which resolution the run's were seen."""
    failures = _File("failures.csv", of_results=True)
    segments = _File("segments", of_results=True)
    report = _File("report.html", of_results=True)

    def maps(self, method: str, split: str = "test") -> Path:
        """The folder of the maps of a method of `heatmap`, or of METHOD-TARGET, on the slides of a split."""
        return _of_split(self.results / "heatmaps", split) / method

    @property
    def mapped(self) -> list[Path]:
        """The folders of the maps that were made, one for each method, target and split; first those of test."""
        maps = self.results / "heatmaps"
        return [path.parent for depth in ("*", "*/*") for path in sorted(maps.glob(f"{depth}/{MAPS}"))]

    def segments_of(self, split: str) -> Path:
        """The folder of what `segment` found on the slides of a split."""
        return _of_split(self.segments, split)

    @property
    def segmented(self) -> list[Path]:
        """The folders of what `segment` found, one for each split; first that of test."""
        return [path.parent for depth in ("", "*/") for path in sorted(self.segments.glob(f"{depth}{SEGMENTS}"))]

    def predictions(self, split: str) -> Path:
        return self.results / "predictions" / f"{split}.csv"

    def evaluation(self, split: str) -> Path:
        return self.results / "evaluation" / f"{split}.json"

    def checkpoint(self, which: str | None = None) -> Path:
        """The chosen checkpoint, or another; an error where there is none."""
        path = self.checkpoint_path(which or self.chosen)
        if not path.is_file() and self.cross_validation.is_file():
            raise UserError(f"{self.path} holds a run for each fold; take one of them, such as {self.path / 'fold0'}")
        if not path.is_file():
            raise UserError(f"there is no checkpoint at {path}; `wsi-train fit` writes best.ckpt and last.ckpt")
        return path

    def checkpoint_path(self, which: str) -> Path:
        """The path of the best or last checkpoint, also before it is written."""
        return self.checkpoints / f"{which}.ckpt" if which in ("best", "last") else Path(which)

    @property
    def begun(self) -> bool:
        """True once a run took a step here: one that ended before, say by a wrong label, has left nothing to lose."""
        steps = (*self.metrics.rglob("metrics.csv"), *self.checkpoints.glob("*.ckpt"))
        return self.config.is_file() and bool(steps)

    def keep(self, path: Path, overwrite: bool) -> None:
        """Refuse to replace a result of an earlier command."""
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already; give --overwrite to write it again")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in the folder; the system lifts this when the process dies."""
        try:
            with lock(self.path / ".lock"):
                yield
        except Locked as error:
            raise UserError(
                f"{self.path} is being written by another run; wait for its end (`wsi-train status` tells), or choose "
                "another --out"
            ) from error

    # The slides.

    def freeze(self, records: Sequence[SlideRecord], seen: bool = True, features: Path | None = None) -> None:
        """Keep the slides with their splits, and the checksums of their files.

        Args:
            records: The slides.
            seen: Whether the network sees them at their own resolution, which is then kept too.
            features: The folder of the features that are read instead of the slides.

        Raises:
            UserError: The same slide is in two splits, under two names.
        """
        slides = {record.slide: record.identity(features) for record in records}
        check_copies(records, slides)
        write_manifest(self.splits, records)
        facts: dict[str, Any] = {"schema": 2, "slides": {name: slide.record() for name, slide in slides.items()}}
        if self.cohort is None:
            write_json(self.environment, environment())
            if seen:
                shown = Seen.of([record for record in records if record.split == "train"])
                facts["seen"] = shown.to_dict()
                if shown.mixed:
                    log.warning(
                        "the slides of the split train have %s, and each is shown as it is; convert them with "
                        "`wsi-train preprocess --mpp` to show them at one resolution", shown,
                    )  # fmt: skip
        write_json(self.facts, facts)

    def identities(self) -> dict[str, SlideId]:
        """Hashes that the run or its cohort keeps of each of its slides; none of a cohort of 1.0."""
        files = {record.slide: record.path for record in self.kept()}
        with as_written(self.facts):
            slides = dict(read_json(self.facts).get("slides", {}))
            return {name: SlideId.read(one, files[name]) for name, one in slides.items() if name in files}

    def record_of(self, path: Path, name: str) -> SlideRecord:
        """A slide without label; of one that the run has, the size of its pixels is known."""
        own = {same_path(record.path): record for record in replace(self, cohort=None).kept()}
        record = own.get(same_path(path))
        mpp = "" if record is None else record.others.get("mpp", "")
        return SlideRecord(name, path, "", name, "", others={"mpp": mpp})

    def as_seen(self, records: Sequence[SlideRecord], tell: bool = True) -> list[SlideRecord]:
        """The records of slides that the run does not have, to be read at the resolution of those it was trained on.

        Runs on features, on patches of a given size in micrometres, and of older versions keep no resolution.

        Args:
            records: The slides.
            tell: Whether to print which are read otherwise than they are.

        Raises:
            UserError: A slide is coarser, or does not say how large its pixels are.
        """
        facts = replace(self, cohort=None).facts
        with as_written(facts):
            seen = read_json(facts).get("seen")
            return list(records) if seen is None else Seen(**seen).show(records, tell)

    def kept(self, columns: Sequence[str] = (), filled: bool = False) -> list[SlideRecord]:
        """The slides that the run keeps, with their splits, where their files are now.

        Args:
            columns: The columns with the label; without any, slides need no label.
            filled: Whether none of these may be empty.
        """
        records = read_splits(self.splits, columns, filled)
        return records if self.data_root is None else moved(records, self.data_root)

    def slides(
        self,
        split: str | None = None,
        columns: Sequence[str] = (),
        filled: bool = False,
        features: Path | None = None,
    ) -> list[SlideRecord]:
        """The slides of a split, or all; those that were replaced or are gone are an error.

        Args:
            split: train, val or test; without it all slides.
            columns: The columns with the label; without any, slides need no label.
            filled: Whether none of these may be empty.
            features: The folder of the features that are read instead of the slides, which may be absent then.
        """
        records = [one for one in self.kept(columns, filled) if split is None or one.split == split]
        if not records:
            raise UserError(f"no slide is in the split {split}; the splits of this run are in {self.splits}")
        if features is None:
            self._check_files(records)
        self._check_content(records, features)
        return self.as_seen(records, tell=False) if features is None and self.cohort is not None else records

    def _check_files(self, records: Sequence[SlideRecord]) -> None:
        absent = [record for record in records if not record.path.exists()]
        if absent:
            raise UserError(
                f"{len(absent)} of {len(records)} slides are missing, the first is {absent[0].path}; if they were "
                f"moved, give --data-root, the folder that now holds what was in {common_folder(records)} (of fit: "
                "--data.stores or --data.root)"
            )
        check_files(records)

    def _check_content(self, records: Sequence[SlideRecord], features: Path | None) -> None:
        began = "run" if self.cohort is None else f"cohort {self.cohort}"
        known = self.identities()
        for record in records:
            one = known.get(record.slide, SlideId())
            if not one.content or (features is not None and one.content == one.hash):  # 1.0 hashed no features
                continue
            now = record.identity(features).content
            if now and now != one.content:  # whoever reads the features says that they are absent
                raise UserError(
                    f"slide {record.slide} at {features or record.path} is not the one that the {began} began with: "
                    "its checksum has changed. Put that back, or test the new slides as another cohort: `wsi-train "
                    f"test {self.path} --cohort MANIFEST.csv --name NAME`"
                )

    def tell_changes(self, data: DataConfig, columns: Sequence[str]) -> None:
        """Print how the manifest differs from the slides that the run keeps."""
        if self.cohort is None and data.manifest.is_file():
            now = read_manifest(data.manifest, data.root, labelled=False)
            for line in changes_since(self.kept(), now, columns):
                say(Console(), line)

    # Other cohorts.

    @property
    def cohorts(self) -> list[str]:
        """The names of the cohorts that were tested or predicted."""
        return sorted(path.name for path in (self.path / "cohorts").glob("*") if path.is_dir())

    def of_cohort(self, name: str) -> Run:
        """The run with the results on another cohort."""
        if not name or Path(name).name != name or name.startswith("."):
            raise UserError(f"--name is {name!r}; it is the name of a folder, as external-1")
        return self._with(cohort=name, data_root=None)

    def below(self, folder: Path | None) -> Run:
        """The run with its slides below a folder, if they have gone from where they were."""
        gone = folder is not None and not all(record.path.exists() for record in self.kept())
        return self._with(data_root=folder) if gone else self

    def _with(self, **changes: Any) -> Run:
        """The same run otherwise; what was loaded stays loaded."""
        other = replace(self, **changes)
        vars(other).update({key: value for key, value in vars(self).items() if key == "loaded"})
        return other

    def holding(self, loaded: Loaded) -> Run:
        """The run with a model that is in memory already; its weights become those of the checkpoint."""
        from wsi_trainer.models.weights import load_weights

        load_weights(loaded.model, self.checkpoint())
        loaded.model.eval()
        other = replace(self)
        vars(other)["loaded"] = loaded
        return other

    def unseen(self, records: Sequence[SlideRecord], features: Path | None = None) -> list[SlideRecord]:
        """The slides that the run was not trained on and that did not choose its checkpoint; others are named.

        Hashes tell; where these cannot be compared, since a file is absent, the names and paths of slides do.

        Args:
            records: The slides.
            features: The folder of the features that are read instead of the slides.
        """
        run = replace(self, cohort=None)
        trained = Trained([record for record in run.kept() if record.split != "test"], run.identities())
        left: dict[tuple[str, bool], list[str]] = defaultdict(list)
        kept = []
        for record in records:
            if (found := trained.find(record, features)) is None:
                kept.append(record)
            else:
                left[found].append(record.slide)
        for (split, by_name), slides in left.items():
            why = ", by their names, since there is no file on both sides to compare" if by_name else ""
            say(
                Console(),
                f"{len(slides)} slides were in the split {split} of the run{why}, left out: {first_names(slides)}",
            )
        if not kept:
            raise UserError(f"the run was trained on all {len(records)} slides of this cohort; give other slides")
        own = {same_patient(record.patient): record.patient for record in trained.records}
        patients = {record.patient for record in kept if same_patient(record.patient) in own}
        if patients:
            say(
                Console(),
                f"{len(patients)} patients are called like patients that the run was trained on: "
                f"{first_names(sorted(patients))}; leave their slides out if they are the same persons",
            )
        return kept

    # From Python.

    @cached_property
    def loaded(self) -> Loaded:
        """The model with the weights of the checkpoint, in evaluation mode, and the settings of data and training."""
        loaded: Loaded = _of_models("config").load(self)
        return loaded

    @cached_property
    def predictor(self) -> Predictor:
        """The model on its device, with one engine for all slides."""
        predictor: Predictor = _of_models("predictor").Predictor(self)
        return predictor

    @property
    def encoder(self) -> nn.Module:
        """The trained backbone, or the network within it that encodes patches, in evaluation mode."""
        from wsi_trainer.models.weights import encoder_of

        return encoder_of(self.loaded.model.backbone)

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The scores of each split that was tested, as in `evaluation/SPLIT.json`."""
        return {path.stem: read_json(path) for path in sorted(self.evaluation("any").parent.glob("*.json"))}

    def predict(self, slide: str | Path) -> dict[str, float]:
        """The prediction of one slide: a number for each name in the columns of `wsi-train predict`.

        Nothing is written into the folder of the run.

        Raises:
            SlideError: The slide cannot be read, whatever `data.on_error` says.
        """
        return self.predictor.predict(slide).to_dict()


def _of_split(folder: Path, split: str) -> Path:
    """The folder of results on a split: those on test, as on the slides of a cohort, are in the folder itself."""
    return folder if split == "test" else folder / split


def _of_models(module: str) -> Any:
    """A module of this folder that needs models: what only reads a run, such as `report`, does not import it."""
    return import_module(f"wsi_trainer.fit.{module}")


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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or an empty one where the file is not there."""
    if not path.is_file():
        return {}
    with as_written(path):
        return dict(read_foreign(path))


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Errors within are said as what they come from: a file of the run that is damaged."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} is damaged, or of another version ({type(error).__name__}: {reason}); make it again, or remove it"
        ) from error


def environment() -> dict[str, Any]:
    """Versions, machine and device, as JSON."""
    import torch

    return {
        "python": sys.version.split()[0],
        "host": platform.node(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": _device(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    return "cpu"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def read_lesion_scores(folder: Path, split: str) -> dict[str, Any]:
    """The scores of a split in scores.json; empty where there are none."""
    scores = read_json(folder / LESION_SCORES)
    return scores if scores.get("split") == split else {}
