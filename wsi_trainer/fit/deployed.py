"""The folder of a deployment, as `wsi-train deploy` writes it: its files, members and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wsi_trainer.errors import UserError
from wsi_trainer.fit.result import Result
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import as_written, read_json, write_json
from wsi_trainer.metrics import Predictions, read_predictions

FILE = "deployment.json"


@dataclass(frozen=True)
class Deployment:
    """The folder of a deployment."""

    path: Path
    data_root: Path | None = None
    """The folder that holds the cohort's slides now, if they were moved."""

    @classmethod
    def at(cls, path: Path, data_root: Path | None = None) -> Deployment | None:
        """The deployment in a folder; None where there is none."""
        return cls(path, data_root) if (path / FILE).is_file() else None

    @property
    def begun(self) -> dict[str, Any]:
        """Facts that are known from the beginning on: its name, its members, how many slides."""
        return read_json(self.path / FILE)

    @property
    def whole(self) -> bool:
        """True once it was finished."""
        return bool(self.begun.get("whole"))

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the deployment: members, slides left out, scores, differences, subgroups, what is unlike."""
        if not (facts := self.begun).get("whole"):
            raise UserError(
                f"the deployment in {self.path} is not finished: `wsi-train status {self.path}` says how far it is, "
                "and `wsi-train deploy` as it was given goes on with it"
            )
        return facts

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write the facts."""
        write_json(self.path / FILE, facts)

    @property
    def status(self) -> Path:
        """The state of the process, as it last described itself."""
        return self.path / "status.json"

    @property
    def predictions_file(self) -> Path:
        """Predictions of all slides, with or without label."""
        return Result(self.path, "predict").file

    @property
    def labelled_file(self) -> Path:
        """Predictions of the slides with labels, beside these."""
        return Result(self.path, "test").file

    @property
    def internal_file(self) -> Path:
        """Predictions of what the members held out."""
        return self.path / "internal.csv"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    def labelled(self) -> Predictions | None:
        """The predictions of slides with labels; None where none has one."""
        return read_predictions(self.labelled_file) if self.labelled_file.is_file() else None

    def internal(self) -> Predictions | None:
        """The predictions of what the members held out; None where they have no such results."""
        return read_predictions(self.internal_file) if self.internal_file.is_file() else None

    @cached_property
    def members(self) -> dict[str, Run]:
        """The members by name, with the results on the cohort."""
        with as_written(self.path / FILE):
            facts = self.begun
            runs = {
                name: Run(Path(one["run"]), one["checkpoint"], facts["name"], place=self.path / "members" / name)
                for name, one in facts["members"].items()
            }
        return {name: run.below(self.data_root) for name, run in runs.items()}

    @property
    def progress(self) -> float:
        """The share of the predictions that are made, from 0 to 1."""
        with as_written(self.path / FILE):
            slides, runs = int(self.begun["slides"]), self.members
        return sum(run.result("predict").share_of(slides) for run in runs.values()) / len(runs)

    def refuse(self, **options: Any) -> None:
        """Refuse options of `report` and `view` that are about a run.

        Raises:
            UserError: One of them is given.
        """
        if given := [name for name, value in options.items() if value]:
            raise UserError(f"--{given[0]} is about a run, and {self.path} is a deployment; leave it out")
