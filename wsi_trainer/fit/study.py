"""Study: runs that belong together: the folds of a cross-validation, or a run and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import as_written, read_json, write_json

if TYPE_CHECKING:
    from pandas import DataFrame

    from wsi_trainer.metrics import Predictions, Score

FILE = "study.json"
RESULTS = {"folds": "cross_validation.json", "comparison": "comparison.json"}


@dataclass(frozen=True)
class Study:
    """A folder of runs that belong together.

    >>> study = Study.open("runs/five-folds")             # doctest: +SKIP
    >>> [run.scores["test"] for run in study.runs.values()]    # doctest: +SKIP
    """

    path: Path
    kind: Literal["folds", "comparison"]
    folders: tuple[str, ...]
    """Of its runs; of a comparison each may be a study of folds."""
    names: tuple[str, ...]
    """What a reader calls them."""
    split: str | None = None
    """The split that is scored: of folds what each holds out; None of a comparison of folds."""

    @classmethod
    def at(cls, path: str | Path) -> Study | None:
        """The study in a folder, also one of version 1.0; None where there is none."""
        path = Path(path)
        about = path / FILE
        with as_written(about):
            if about.is_file():
                facts = read_json(about)
                return cls(
                    path, _kind(facts["kind"]), _folders(facts["folders"]), tuple(facts["names"]), facts["split"]
                )
        about = path / RESULTS["comparison"]
        with as_written(about):
            if about.is_file():
                facts = read_json(about)
                split = facts["split"] if facts["split"] in ("val", "test") else None
                folders = _folders(["run", facts["compared with"]])
                return cls(path, "comparison", folders, tuple(map(str, facts["runs"])), split)
        about = path / RESULTS["folds"]
        drawn = sorted((path / "folds").glob("fold*.csv"), key=lambda fold: (len(fold.stem), fold.stem))
        with as_written(about):
            if drawn or about.is_file():
                facts = read_json(about)
                folders = _folders(facts.get("runs") or [fold.stem for fold in drawn] or ["fold0"])
                return cls(path, "folds", folders, folders, facts.get("split"))
        return None

    @classmethod
    def open(cls, path: str | Path) -> Study:
        """The study in a folder.

        Raises:
            UserError: There is none.
        """
        if (study := cls.at(path)) is None:
            raise UserError(f"{path} is no study: it has no {FILE}, which `wsi-train fit --folds` or --compare writes")
        return study

    def write(self) -> None:
        """Say in the folder what belongs together."""
        write_json(self.path / FILE, {"schema": 1, **{k: v for k, v in asdict(self).items() if k != "path"}})

    @property
    def runs(self) -> dict[str, Run]:
        """Its runs by their names; those of folds that are compared are in `parts`."""
        return {name: Run(self.path / folder) for name, folder in zip(self.names, self.folders, strict=True)}

    @property
    def parts(self) -> dict[str, Study | None]:
        """By the names of its runs, the study that each is, where it is one."""
        return {name: Study.at(run.path) for name, run in self.runs.items()}

    @property
    def results(self) -> Path:
        """The file with the scores of all together: whether it is there says whether the study is finished."""
        return self.path / RESULTS[self.kind]

    @property
    def scores(self) -> dict[str, Any]:
        """Of folds the scores of each, their mean, spread and pooled scores; of a comparison those of both runs, their
        difference and what they cost.
        """
        return read_json(self.results)

    @property
    def each(self) -> dict[str, Predictions]:
        """The predictions of each run on the split; of folds that are compared, all that they hold out."""
        from wsi_trainer.metrics import read_predictions  # slow to import

        parts = self.parts
        return {
            name: read_predictions(run.predictions_file(str(self.split)))
            if (part := parts[name]) is None
            else part.pooled
            for name, run in self.runs.items()
        }

    @property
    def pooled(self) -> Predictions:
        """The predictions of all folds on what they hold out."""
        from wsi_trainer.metrics import joined_folds

        return joined_folds(list(self.each.values()))

    def cross_validate(self, scores: Mapping[str, Score], resamples: int, seed: int, by: str) -> dict[str, Any]:
        """Write the scores of folds, each and together; returns them."""
        from wsi_trainer.metrics import at_the_point, cross_validation, survivals

        facts: dict[str, Any] = {"split": self.split, "by": by, "runs": list(self.folders)}
        facts |= cross_validation(list(self.each.values()), scores, resamples, seed)
        pooled = self.pooled
        facts |= {"operating_points": points} if (points := at_the_point(pooled)) else {}
        facts |= {"survival": found} if (found := survivals(pooled, {})) else {}
        write_json(self.results, facts)
        return facts

    def compare(self, scores: Mapping[str, Score], resamples: int, seed: int) -> dict[str, Any]:
        """The scores of all runs on the slides that all predicted, and differences of the first from each, paired."""
        from wsi_trainer.metrics import comparison

        first, *others = self.each.values()
        return {"split": self.split or "what folds hold out", **comparison(first, others, scores, resamples, seed)}

    def _repr_html_(self) -> str:
        from wsi_trainer.notebook import study_card

        return study_card(self)

    def table(self) -> DataFrame:
        """The scores as a table, a row for each: of folds with their mean, spread and pooled scores, of two runs with
        their difference.

        Raises:
            UserError: Not all runs are finished.
        """
        from wsi_trainer.notebook import study_of

        return study_of(self)

    def refuse(self) -> UserError:
        """The error of a command that needs one run."""
        first = next(iter(self.runs.values())).path
        what = "each fold" if self.kind == "folds" else "each side of a comparison"
        return UserError(f"{self.path} holds a run for {what}; take one of them, such as {first}")


def _kind(kind: str) -> Literal["folds", "comparison"]:
    if kind not in ("folds", "comparison"):
        raise ValueError(f"a study is of folds or a comparison, and not {kind}")
    return kind  # type: ignore[return-value]


def _folders(names: Sequence[str]) -> tuple[str, ...]:
    """Names of folders in the study's own: a study may come from somebody else."""
    for name in names:
        if Path(name).name != name or name.startswith("."):
            raise ValueError(f"{name} is no folder in it")
    return tuple(map(str, names))
