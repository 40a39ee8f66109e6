"""The folder of a run: everything a later command, or a reader in a year, needs to know about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsi_trainer.errors import UserError
from wsi_trainer.foreign import read_json as read_foreign


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def splits(self) -> Path:
        return self.path / "splits.csv"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def memory(self) -> Path:
        return self.path / "memory.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def estimate(self) -> Path:
        return self.path / "estimate.json"

    @property
    def pretrained(self) -> Path:
        return self.path / "pretrained.json"

    @property
    def failures(self) -> Path:
        return self.path / "failures.csv"

    @property
    def cross_validation(self) -> Path:
        return self.path / "cross_validation.json"

    @property
    def cost(self) -> Path:
        return self.path / "cost.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def heatmaps(self) -> Path:
        return self.path / "heatmaps"

    @property
    def segments(self) -> Path:
        return self.path / "segments"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def predictions(self, split: str) -> Path:
        return self.path / "predictions" / f"{split}.csv"

    def evaluation(self, split: str) -> Path:
        return self.path / "evaluation" / f"{split}.json"

    def checkpoint(self, which: str = "best") -> Path:
        """The best or last checkpoint, or the path of any; an error where there is none."""
        path = self.checkpoint_path(which)
        if not path.is_file():
            raise UserError(f"there is no checkpoint at {path}; `wsi-train fit` writes best.ckpt and last.ckpt")
        return path

    def checkpoint_path(self, which: str) -> Path:
        """Where the best or last checkpoint is or will be."""
        return self.checkpoints / f"{which}.ckpt" if which in ("best", "last") else Path(which)

    @property
    def begun(self) -> bool:
        """Whether a run took a step here: one that ended before, say by a wrong label, has left nothing to lose."""
        steps = (*self.metrics.rglob("metrics.csv"), *self.checkpoints.glob("*.ckpt"))
        return self.config.is_file() and bool(steps)

    def existing(self) -> RunFolder:
        """This folder, or an error if it is not one of a run."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not the folder of a run: it has no {self.config.name}")
        return self


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object so that a killed process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text so that a killed process leaves the old file or the new one."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or an empty one where the file is not there."""
    if not path.is_file():
        return {}
    with as_written(path):
        return dict(read_foreign(path))


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """What goes wrong here, goes wrong because a file of the run is damaged: the error says so."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} is damaged, or of another version ({type(error).__name__}: {reason}); make it again, or remove it"
        ) from error
