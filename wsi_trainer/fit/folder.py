"""The folder of a run, as `wsi-train fit` wrote it: its files, checkpoints, slides and results; no model is opened.

`fit` freezes the config, the slides with their splits, the checksums of their files and the versions. Every other
command opens the run and reads them from there; the manifest that the run began with may have changed since. Results on
another cohort are in a folder of their own, `cohorts/NAME`, laid out like those of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from wsi_trainer.data.cohort import KeptSlides, Seen, Trained
from wsi_trainer.data.manifest import SPLITS, SlideRecord, read_manifest
from wsi_trainer.data.splits import changes_since
from wsi_trainer.environment import environment, versions
from wsi_trainer.errors import UserError
from wsi_trainer.fit.result import Kind, Result, Work, seals_of
from wsi_trainer.io.display import clean, say
from wsi_trainer.io.files import Locked, as_written, lock, read_json, sha256_of, write_json
from wsi_trainer.io.tables import append_row, read_table
from wsi_trainer.slide.identity import SlideId
from wsi_trainer.slide.names import same_path, same_patient

if TYPE_CHECKING:
    from wsi_trainer.data.dataset import DataConfig

log = logging.getLogger("wsi_trainer")

PLACES = ("data.stores", "data.features")
"""Keys that say where what a run reads is."""
OF_MACHINE = ("data.workers", "data.ahead")
"""Keys that say how a machine reads it."""


class _File:
    """The path of a file or folder of a run: `run.config`."""

    def __init__(self, name: str, of: str = "path") -> None:
        """Name the file.

        Args:
            name: Its name.
            of: The folder: `path` of the run, `own` of its cohort, or `results` of a checkpoint on that.
        """
        self.name, self.of = name, of

    def __get__(self, run: RunFolder, kind: type[RunFolder]) -> Path:
        folder: Path = getattr(run, self.of)
        return folder / self.name


@dataclass(frozen=True, repr=False)
class RunFolder:
    """The folder of a run, and what lies in it."""

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
    place: Path | None = None
    """The folder of the cohort's results, where that is not in the run: then nothing is written into the run."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        checkpoint: str = "best",
        cohort: str | None = None,
        data_root: str | Path | None = None,
        overrides: Sequence[str] = (),
        trust: bool = False,
    ) -> Self:
        """Open a run that `fit` wrote. Its slides are read as the command before read them, unless told otherwise.

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
        return run._as_remembered()

    @classmethod
    def of_checkpoint(cls, path: str | Path, trust: bool = False) -> Self:
        """The run that a checkpoint lies in, as `fit` wrote it.

        Args:
            path: The checkpoint.
            trust: Whether the config may name classes and functions beyond this package.
        """
        path = Path(path)
        run = cls(path.absolute().parent.parent, str(path), trust=trust)
        if not run.config.is_file():
            raise UserError(f"{path} is in no folder of a run, whose {run.config.name} says what its network is")
        return run

    @classmethod
    def at(cls, path: Path, cohort: str | None = None) -> Self:
        """The run in a folder; or that of a checkpoint, with the results of this checkpoint.

        Args:
            path: The folder, or the checkpoint.
            cohort: The cohort whose results are meant.
        """
        if path.is_file():
            return cls.open(cls.of_checkpoint(path).path, str(path), cohort)
        return cls.open(path, cohort=cohort)

    def existing(self) -> Self:
        """This run, or an error if the folder is not one of a run."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not the folder of a run: it has no {self.config.name}")
        return self

    @property
    def name(self) -> str:
        of = [self.path.resolve().name, self.cohort, None if self.chosen == "best" else self.checkpoint_name]
        return ", ".join(filter(None, of))

    # Files of the run.

    config = _File("config.yaml")
    environment = _File("environment.json")
    memory = _File("memory.json")
    plan = _File("plan.json")
    estimate = _File("estimate.json")
    decisions = _File("decisions.json", "writable")
    """The thresholds that were chosen for each checkpoint on the validation slides."""
    baseline = _File("baseline.json", "writable")
    """Of a survival, the risks of the training patients for each checkpoint: their median and baseline hazard."""
    pretrained = _File("pretrained.json")
    head_pretrained = _File("head_pretrained.json")
    cost = _File("cost.json")
    metrics = _File("metrics")
    log = _File("log.txt", "writable")
    status = _File("status.json")
    checkpoints = _File("checkpoints")

    # Files of its own slides, or of a cohort's.

    @property
    def own(self) -> Path:
        if self.cohort is None:
            return self.path
        return self.path / "cohorts" / self.cohort if self.place is None else self.place

    @property
    def writable(self) -> Path:
        """The folder of what a command adds to the run."""
        return self.path if self.place is None else self.place

    @property
    def splits(self) -> Path:
        return self._kept.splits

    options = _File("options.json", "own")
    """How the slides are read: what the commands before were given, and those after need not be."""

    # Results on these, of one checkpoint.

    @property
    def results(self) -> Path:
        name = self.checkpoint_name
        return self.own if name == "best" else self.own / f"checkpoint-{name}"

    @property
    def failures(self) -> Path:
        return (self.results if self.place is None else self.place) / "failures.csv"

    report = _File("report.html", "results")

    def result(self, kind: Kind, split: str = "test", method: str = "") -> Result:
        """The place of a result."""
        return Result(self.results, kind, split, method)

    @property
    def found(self) -> list[Result]:
        """The results that there are."""
        return Result.found(self.results)

    @property
    def outdated(self) -> str:
        """Says which results are of weights that the checkpoint held before training went on; empty where none is."""
        if not self.checkpoint_path(self.chosen).is_file():
            return ""
        now, former = sha256_of(self.checkpoint()), []
        for one in self.found:
            with as_written(one.about):
                if one.of.get("checkpoint", {}).get("sha256", now) != now:  # 1.0 did not say
                    former.append(one.last.relative_to(self.writable).as_posix())
        files = ", ".join(former)
        return files and f"of weights from before training went on: {files}; give their commands again with --overwrite"

    def maps(self, method: str, split: str = "test") -> Path:
        """The folder of the maps of a method of `heatmap`, or of METHOD-TARGET, on the slides of a split."""
        return self.result("heatmap", split, method).folder

    @property
    def segments(self) -> Path:
        """The folder of what `segment` found on the split test, or on a cohort."""
        return self.result("segment").folder

    def predictions_file(self, split: str) -> Path:
        return self.result("test", split).file

    def evaluation(self, split: str) -> Path:
        return self.result("test", split).scores

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The scores of each split that was tested, as in `evaluation/SPLIT.json`."""
        return {one.split: read_json(one.scores) for one in self.found if one.kind == "test"}

    @property
    def curves(self) -> Curves:
        """Measurements of each epoch."""
        return read_curves(self.metrics)

    def work(
        self, result: Result, records: Sequence[SlideRecord], options: Any = None, overwrite: bool = False
    ) -> Work:
        """Begin a result on these slides, or go on with what an earlier process left unfinished.

        Args:
            result: Its place.
            records: The slides, or patients.
            options: What else it is of: a dataclass or a mapping.
            overwrite: Whether to replace one that is whole.
        """
        of: dict[str, Any] = {
            "schema": 1, "kind": result.kind, "split": result.split, "method": result.method, "cohort": self.cohort,
            "checkpoint": {"name": self.checkpoint_name, "sha256": sha256_of(self.checkpoint())},
            "overrides": self.given,
            "options": asdict(options) if is_dataclass(options) and not isinstance(options, type) else options or {},
            "versions": versions(),
        }  # fmt: skip
        return Work(result, of, seals_of(records, self.identities()), overwrite)

    def finish(self, work: Work) -> None:
        """End a result whose files are written."""
        self.remember()
        work.finish()

    @property
    def is_tested(self) -> bool:
        """True where a checkpoint was scored on these slides."""
        return any(one.kind == "test" for one in self._all_found)

    @property
    def _all_found(self) -> list[Result]:
        """The results of all checkpoints."""
        return [one for root in (self.own, *sorted(self.own.glob("checkpoint-*"))) for one in Result.found(root)]

    # Checkpoints.

    @property
    def decided(self) -> dict[str, Any]:
        """The thresholds that were chosen for the checkpoint, and by which rule; empty where none were."""
        return self._kept_of(self.decisions)

    @property
    def trained_risks(self) -> dict[str, Any]:
        """By target the baseline of the checkpoint's risks; empty where none was computed, or of former weights."""
        kept = self._kept_of(self.baseline)
        return kept["targets"] if kept.get("sha256") == sha256_of(self.checkpoint()) else {}

    def _kept_of(self, file: Path) -> dict[str, Any]:
        """The facts of the checkpoint in a file, at the place of the results or in the run."""
        for path in dict.fromkeys((file, self.path / file.name)):
            with as_written(path):
                if found := read_json(path).get(self.checkpoint_name):
                    return dict(found)
        return {}

    def checkpoint(self, which: str | None = None) -> Path:
        """The chosen checkpoint, or another; an error where there is none."""
        path = self.checkpoint_path(which or self.chosen)
        if not path.is_file():
            raise UserError(f"there is no checkpoint at {path}; `wsi-train fit` writes best.ckpt and last.ckpt")
        return path

    def checkpoint_path(self, which: str) -> Path:
        """The path of the best or last checkpoint, also before it is written."""
        return self.checkpoints / f"{which}.ckpt" if which in ("best", "last") else Path(which)

    @cached_property
    def checkpoint_name(self) -> str:
        """The name of the checkpoint in those of results: best, last, or that of its file with a part of its hash."""
        for name in ("best", "last"):
            if self.chosen == name or same_path(self.chosen) == same_path(self.checkpoint_path(name)):
                return name
        path = self.checkpoint()
        return f"{path.stem}-{sha256_of(path)[:8]}"

    @property
    def begun(self) -> bool:
        """True once a run took a step here: one that ended before, say by a wrong label, has left nothing to lose."""
        steps = (*self.metrics.rglob("metrics.csv"), *self.checkpoints.glob("*.ckpt"))
        return self.config.is_file() and bool(steps)

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

    @property
    def _kept(self) -> KeptSlides:
        return KeptSlides(self.own, self.data_root)

    @property
    def _trained(self) -> KeptSlides:
        return KeptSlides(self.path, self.data_root if self.cohort is None else None)

    def freeze(self, records: Sequence[SlideRecord], seen: bool = True, features: Path | None = None) -> None:
        """Keep the slides with their splits, and the checksums of their files.

        Args:
            records: The slides.
            seen: Whether the network sees them at their own resolution, which a run then keeps too.
            features: The folder of the features that are read instead of the slides.

        Raises:
            UserError: The same slide is in two splits, under two names; or a cohort has results on other slides.
        """
        if self.cohort is not None:
            self.check_same(records, features)
            self._write_options({})
        own = self.cohort is None
        self._kept.freeze(records, features, seen and own, tell=own)
        if self.cohort is None:
            write_json(self.environment, environment())

    def check_same(self, records: Sequence[SlideRecord], features: Path | None = None) -> None:
        """Refuse slides under the name of a cohort that has results on others."""
        if self._all_found and self.splits.is_file() and not self._kept.are(records, features):
            raise UserError(
                f"the cohort {self.cohort} has other slides, and results on them in {self.own}; give these slides "
                "another --name, or remove that folder"
            )

    def identities(self) -> dict[str, SlideId]:
        """Hashes that the run or its cohort keeps of each of its slides; none of a cohort of 1.0."""
        return self._kept.identities() if self.splits.is_file() else {}

    def record_of(self, path: Path, name: str, columns: Sequence[str] = ()) -> SlideRecord:
        """A slide without label; of one that the run has, patient, site, size of its pixels and some cells are known.

        Args:
            path: The slide.
            name: Its name.
            columns: Those cells.
        """
        known = self._by_path.get(same_path(path), SlideRecord(name, path, "", name, ""))
        others = {column: known.others[column] for column in columns if column in known.others}
        others["mpp"] = known.others.get("mpp", "")
        return SlideRecord(name, path, "", known.patient, "", known.site, others)

    @cached_property
    def _by_path(self) -> dict[str, SlideRecord]:
        """The run's own slides by their paths."""
        return {same_path(record.path): record for record in self._trained.records()}

    def as_seen(self, records: Sequence[SlideRecord], tell: bool = True) -> list[SlideRecord]:
        """The records of slides that the run does not have, to be read at the resolution of those it was trained on.

        Runs on features, on patches of a given size in micrometres, and of older versions keep no resolution.

        Args:
            records: The slides.
            tell: Whether to print which are read otherwise than they are.

        Raises:
            UserError: A slide is coarser, or does not say how large its pixels are.
        """
        return list(records) if self.seen is None else self.seen.show(records, tell)

    @cached_property
    def seen(self) -> Seen | None:
        """The resolution at which the model saw the slides of training."""
        return self._trained.seen

    def kept(self, columns: Sequence[str] = (), filled: bool = False) -> list[SlideRecord]:
        """The slides that the run keeps, with their splits, where their files are now; see `KeptSlides.records`."""
        return self._kept.records(columns, filled)

    @property
    def by_split(self) -> dict[str, list[SlideRecord]]:
        """The slides that the run keeps, of each split that has some."""
        records = self.kept() if self.splits.is_file() else []
        found = {split: [record for record in records if record.split == split] for split in SPLITS}
        return {split: own for split, own in found.items() if own}

    def records(
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
            self._kept.check_files(records)
        if (other := self._kept.replaced(records, features)) is not None:
            began = "run" if self.cohort is None else f"cohort {self.cohort}"
            raise UserError(
                f"slide {other.slide} at {features or other.path} is not the one that the {began} began with: its "
                "checksum has changed. Put that back, or test the new slides as another cohort: `wsi-train test "
                f"{self.path} --cohort MANIFEST.csv --name NAME`"
            )
        return self.as_seen(records, tell=False) if features is None and self.cohort is not None else records

    def unseen(self, records: Sequence[SlideRecord], features: Path | None = None) -> list[SlideRecord]:
        """The slides that the run was not trained on and that did not choose its checkpoint; others are named.

        Hashes tell; where these cannot be compared, since a file is absent, the names and paths of slides do.

        Args:
            records: The slides.
            features: The folder of the features that are read instead of the slides.
        """
        trained = [record for record in self._trained.records() if record.split != "test"]
        return Trained(trained, self._trained.identities()).others(records, features)

    def shared(self, records: Sequence[SlideRecord], features: Path | None = None) -> tuple[set[str], set[str]]:
        """Names of the slides, and of the patients, that the run has in any of its splits under whatever name.

        Args:
            records: Slides of another cohort.
            features: The folder of the features that are read instead of the slides.
        """
        kept = self._trained.records()
        known, called = Trained(kept, self._trained.identities()), {same_patient(one.patient) for one in kept}
        slides = {record.slide for record in records if known.find(record, features) is not None}
        return slides, {record.patient for record in records if same_patient(record.patient) in called}

    def tell_changes(self, data: DataConfig, columns: Sequence[str], covariates: Sequence[str] = ()) -> None:
        """Print how the manifest differs from the slides that the run keeps.

        Args:
            data: Names the manifest.
            columns: Those of the label.
            covariates: Those beside the slide.
        """
        if self.cohort is None and data.manifest.is_file():
            now = read_manifest(data.manifest, data.root, labelled=False)
            for line in changes_since(self.kept(), now, columns, covariates):
                say(Console(), line)

    # How the slides are read.

    @property
    def given(self) -> dict[str, str]:
        """Keys of the config that a command changes, with paths that mean the same from any folder."""
        words = (word.removeprefix("--").partition("=") for word in self.overrides)
        return {
            key: str(Path(value).absolute()) if key in PLACES and value != "null" else value for key, _, value in words
        }

    def remember(self) -> None:
        """Keep how the slides are read for the commands that follow; of the run's own only where they are."""
        self._write_options(read_json(self.options))

    def _write_options(self, before: Mapping[str, Any]) -> None:
        of_data = {k: value for k, value in self.given.items() if k.startswith("data.") and k not in OF_MACHINE}
        keys = of_data if self.cohort is not None else {key: of_data[key] for key in PLACES if key in of_data}
        now = {"keys": {**before.get("keys", {}), **keys}, "data_root": before.get("data_root")}
        if self.data_root is not None:
            now["data_root"] = str(self.data_root.absolute())
        if now != before and (self.options.is_file() or now["keys"] or now["data_root"]):
            write_json(self.options, now)

    def _as_remembered(self) -> Self:
        with as_written(self.options):
            kept = read_json(self.options)
            keys = {str(key): str(value) for key, value in dict(kept.get("keys", {})).items()}
            root = Path(kept["data_root"]) if kept.get("data_root") else None
        words = [f"--{key}={value}" for key, value in keys.items() if key.startswith("data.") and key not in self.given]
        run = self._with(overrides=(*words, *self.overrides))
        return run.below(root) if self.data_root is None and root is not None and root.is_dir() else run

    # Other cohorts.

    @property
    def cohorts(self) -> list[str]:
        """The names of the cohorts that were tested or predicted."""
        return sorted(path.name for path in (self.path / "cohorts").glob("*") if path.is_dir())

    @property
    def without_cohort(self) -> Self:
        """The run with the results on its own slides, which lie where it has them."""
        if self.cohort is None:
            return self
        own = tuple(word for word in self.overrides if word.removeprefix("--").partition("=")[0] not in PLACES)
        run = self._with(cohort=None, data_root=None, overrides=own)
        if own != self.overrides:
            vars(run).pop("loaded", None)  # which reads the cohort's
        return run._as_remembered()

    def of_cohort(self, name: str, place: Path | None = None) -> Self:
        """The run with the results on another cohort, whose slides are read as for the results that it has.

        Args:
            name: The cohort's name.
            place: The folder of the results; by default one in the run.
        """
        if not name or Path(name).name != name or name.startswith("."):
            raise UserError(f"--name is {name!r}; it is the name of a folder, as external-1")
        run = self._with(cohort=name, data_root=None, place=place)
        return run._as_remembered() if run._all_found else run

    def below(self, folder: Path | None) -> Self:
        """The run with its slides below a folder, if they have gone from where they were."""
        gone = folder is not None and not all(record.path.exists() for record in self.kept())
        return self._with(data_root=folder) if gone else self

    def _with(self, **changes: Any) -> Self:
        """The same run otherwise; what was loaded stays loaded."""
        other = replace(self, **changes)
        vars(other).update({key: value for key, value in vars(self).items() if key == "loaded"})
        return other


Curves = dict[str, list[float]]
"""A number for each epoch, by the name of what was measured."""


def read_curves(folder: Path) -> Curves:
    """The columns of the metrics by epoch; where a run was resumed, the later start counts."""
    columns: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("version_*/metrics.csv"), key=lambda p: int(p.parent.name.removeprefix("version_"))):
        with as_written(path):
            for _, row in read_table(path, cut=True).rows:
                for name, value in row.items():
                    if value and row["epoch"]:
                        columns.setdefault(name, {})[int(row["epoch"])] = float(value)
    return {name: [values[epoch] for epoch in sorted(values)] for name, values in columns.items()}


FAILURE_COLUMNS = ("slide", "stage", "epoch", "reason")


def note_failure(path: Path, slide: str, stage: str, epoch: int, reason: str) -> None:
    """Write a slide that is left out to failures.csv, and say so at once."""
    append_row(path, FAILURE_COLUMNS, [slide, stage, epoch, reason])
    log.warning("slide %s is left out (%s): %s", clean(slide), stage, clean(reason))
