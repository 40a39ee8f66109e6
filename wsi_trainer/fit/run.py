"""A run: the folder of `wsi-train fit`, with all that later commands need to know.

`fit` freezes the config, the slides with their splits, the checksums of their files and the versions. Every other
command opens the run and reads them from there; the manifest that the run began with may have changed since. Results on
another cohort are in a folder of their own, `cohorts/NAME`, laid out like those of the run.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console

from wsi_trainer.data.cohort import Seen, Trained, check_copies, common_folder, moved, read_headers
from wsi_trainer.data.manifest import SlideRecord, check_files, read_manifest, write_manifest
from wsi_trainer.data.splits import changes_since, first_names, read_splits
from wsi_trainer.environment import environment
from wsi_trainer.errors import UserError
from wsi_trainer.io.display import say
from wsi_trainer.io.files import Locked, as_written, lock, read_json, write_json
from wsi_trainer.slide.identity import SlideId
from wsi_trainer.slide.names import same_path, same_patient

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

    from wsi_trainer.data.dataset import DataConfig
    from wsi_trainer.fit.config import Loaded
    from wsi_trainer.fit.predictor import Predictor

log = logging.getLogger("wsi_trainer")
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


@dataclass(frozen=True, repr=False)
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

    @classmethod
    def of_checkpoint(cls, path: str | Path, trust: bool = False) -> Run:
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

    def predictions_file(self, split: str) -> Path:
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
            headers = read_headers(records) if features is None else []
            if seen:
                shown = Seen.of([header for header in headers if header.record.split == "train"])
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
        return SlideRecord(name, path, "", name, "", others={"mpp": self._pixel_sizes.get(same_path(path), "")})

    @cached_property
    def _pixel_sizes(self) -> dict[str, str]:
        """The column mpp of the run's own slides, by their paths."""
        own = replace(self, cohort=None).kept()
        return {same_path(record.path): record.others.get("mpp", "") for record in own}

    def as_seen(self, records: Sequence[SlideRecord], tell: bool = True) -> list[SlideRecord]:
        """The records of slides that the run does not have, to be read at the resolution of those it was trained on.

        Runs on features, on patches of a given size in micrometres, and of older versions keep no resolution.

        Args:
            records: The slides.
            tell: Whether to print which are read otherwise than they are.

        Raises:
            UserError: A slide is coarser, or does not say how large its pixels are.
        """
        if self.seen is not None:
            return self.seen.show(records, tell)
        if tell and self.loaded.data.features is None:
            read_headers(records)
        return list(records)

    @cached_property
    def seen(self) -> Seen | None:
        """The resolution at which the model saw the slides of training."""
        facts = replace(self, cohort=None).facts
        with as_written(facts):
            seen = read_json(facts).get("seen")
            return None if seen is None else Seen(**seen)

    def kept(self, columns: Sequence[str] = (), filled: bool = False) -> list[SlideRecord]:
        """The slides that the run keeps, with their splits, where their files are now.

        Args:
            columns: The columns with the label; without any, slides need no label.
            filled: Whether none of these may be empty.
        """
        records = read_splits(self.splits, columns, filled)
        return records if self.data_root is None else moved(records, self.data_root)

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
        predictor: Predictor = _of_models("predictor").Predictor(self.loaded, self)
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

    @overload
    def predict(self, slides: str | Path) -> dict[str, float]: ...

    @overload
    def predict(self, slides: Sequence[str | Path] | DataFrame) -> DataFrame: ...

    def predict(self, slides: str | Path | Sequence[str | Path] | DataFrame) -> dict[str, float] | DataFrame:
        """The prediction of a slide: a number for each name in the columns of `wsi-train predict`; a table of several.

        Nothing is written into the folder of the run.

        Args:
            slides: A slide, or several, or a table of them as a manifest has it, whose labels are not looked at.

        Raises:
            SlideError: A slide cannot be read, whatever `data.on_error` says.
        """
        if isinstance(slides, str | Path):
            return self.predictor.predict(slides).to_dict()
        from wsi_trainer.notebook import predicted

        return predicted(self, slides)

    # What a notebook shows; tables need pandas.

    def __repr__(self) -> str:
        from wsi_trainer.notebook import RunCard

        return RunCard(self).text

    def _repr_html_(self) -> str:
        from wsi_trainer.notebook import RunCard

        return RunCard(self).html

    @property
    def slides(self) -> DataFrame:
        """The slides that the run, or its cohort, keeps: a row for each, with its split."""
        from wsi_trainer.notebook import slides_of

        return slides_of(self.kept())

    def predictions(self, split: str = "test") -> DataFrame:
        """The predictions of the slides of a split: a row for each, beside its label."""
        from wsi_trainer.metrics import read_predictions
        from wsi_trainer.notebook import predictions_of

        return predictions_of(read_predictions(self.predictions_file(split)))

    def compare(self, other: Run, split: str = "test") -> DataFrame:
        """The scores of both runs on the slides that both have predicted, their differences and 95 % intervals."""
        from wsi_trainer.notebook import compared

        return compared(self, other, split)


def _of_split(folder: Path, split: str) -> Path:
    """The folder of results on a split: those on test, as on the slides of a cohort, are in the folder itself."""
    return folder if split == "test" else folder / split


def _of_models(module: str) -> Any:
    """A module of this folder that needs models: what only reads a run, such as `report`, does not import it."""
    return import_module(f"wsi_trainer.fit.{module}")


def read_lesion_scores(folder: Path, split: str) -> dict[str, Any]:
    """The scores of a split in scores.json; empty where there are none."""
    scores = read_json(folder / LESION_SCORES)
    return scores if scores.get("split") == split else {}
