"""Predictions of several targets by one network, and the files that hold predictions of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.io.files import write_json
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.metrics.classes import ClassPredictions, MultiLabelPredictions
from wsi_trainer.metrics.decision import Decision
from wsi_trainer.metrics.pixels import AreaPredictions
from wsi_trainer.metrics.table import OWNERS, Predictions, PredictionsError, Score, Table, Words
from wsi_trainer.metrics.values import RiskPredictions, ValuePredictions

KINDS: Mapping[str, type[Predictions]] = {
    kind.KIND: kind
    for kind in (ClassPredictions, MultiLabelPredictions, ValuePredictions, RiskPredictions, AreaPredictions)
}
"""The kinds of predictions of a target, by their names in a file."""
_MARKS_OF_1_0 = {"risk": "risk", "value": "number", "label": "classes", "label_": "labels"}
"""Columns that tell the kind of a target of slides in a table of 1.0, in the order in which they are looked for."""


def prefixes(columns: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The prefix of the columns of each target: nothing, or `NAME_` where an earlier one has a column so named."""
    taken, found = set(OWNERS), {}
    for name, own in columns.items():
        listed = list(own)
        found[name] = f"{name}_" if taken & set(listed) else ""
        taken |= {found[name] + column for column in listed}
    return found


@dataclass(frozen=True)
class OfTarget:
    """A score of one target of several."""

    target: str
    score: Score

    def __call__(self, predictions: Predictions) -> float:
        part = predictions.by_target[self.target]
        return self.score(part) if len(part) else float("nan")


def scores_by_target(scores: Mapping[str, Mapping[str, Score]]) -> dict[str, Score]:
    """The scores of several targets by one name each; those of all but the first have `NAME_` before theirs."""
    return {
        name if place == 0 else f"{target}_{name}": OfTarget(target, score)
        for place, (target, own) in enumerate(scores.items())
        for name, score in own.items()
    }


@dataclass(frozen=True, repr=False)
class MultiTargetPredictions(Predictions):
    """Predictions of several targets of the same slides, row by row. Each target has labels of its own that are absent.

    A target of pixels is the first, and the words and the error of a slide are then those of the others before it.
    """

    TARGET: ClassVar = ""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    parts: Mapping[str, Predictions]
    """The predictions of each target, of all rows."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            if part.slides != self.slides:
                raise PredictionsError(f"the target {name} is of other slides, or in another order")

    @classmethod
    def of(cls, parts: Mapping[str, Predictions]) -> Self:
        """The predictions of targets of the same slides."""
        first = next(iter(parts.values()))
        return cls(first.slides, first.patients, parts, first.sites)

    @property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The classes of the first target."""
        return getattr(next(iter(self.parts.values())), "classes", ())

    @property
    def by_target(self) -> Mapping[str, Predictions]:
        return {name: part.labelled for name, part in self.parts.items()}

    @property
    def known(self) -> NDArray[np.bool_]:
        return np.any([part.known for part in self.parts.values()], axis=0)

    @property
    def truth(self) -> NDArray[np.float64]:
        return np.column_stack([part.truth.astype(np.float64) for part in self.parts.values()])

    @property
    def _of_slides_first(self) -> list[tuple[str, Predictions]]:
        return sorted(self.parts.items(), key=lambda item: item[1].OF_PIXELS)

    @property
    def error_means(self) -> str:
        name, part = self._of_slides_first[0]
        return f"{name}: {part.error_means}, or of the next target that is known"

    def errors(self) -> NDArray[np.float64]:
        errors = np.full(len(self), np.nan)
        for _, part in self._of_slides_first:
            errors = np.where(np.isnan(errors) & part.known, part.errors(), errors)
        return errors

    def words(self, row: int) -> Words:
        words = {name: part.words(row) for name, part in self._of_slides_first}
        label = "; ".join(f"{name}: {one.label or 'unknown'}" for name, one in words.items())
        predicted = "; ".join(f"{name}: {one.predicted}" for name, one in words.items())
        return Words(label, predicted, wrong=any(one.wrong for one in words.values()))

    def groups(self) -> list[NDArray[np.bool_]]:
        return [group for part in self.parts.values() for group in part.groups()]

    def scored(self, scores: Mapping[str, Score]) -> list[tuple[Predictions, Mapping[str, Score]]]:
        own = {name: one for name, one in scores.items() if isinstance(one, OfTarget)}
        return [
            (part, {name: one.score for name, one in own.items() if one.target == target})
            for target, part in self.by_target.items()
        ]

    def by_class(self, scores: Mapping[str, Score]) -> dict[str, dict[str, tuple[Predictions, dict[str, Score]]]]:
        found = {}
        for place, (target, (part, own)) in enumerate(zip(self.parts, self.scored(scores), strict=True)):
            for heading, classes in part.by_class(own).items() if len(part) else ():
                found[heading if place == 0 else f"{target}_{heading}"] = classes
        return found

    def like(self, other: Predictions) -> Self:
        theirs = getattr(other, "parts", {})
        return replace(self, parts={n: p.like(theirs[n]) if n in theirs else p for n, p in self.parts.items()})

    def by_patient(self) -> Self:
        first = next(iter(self.parts.values())).by_patient()
        parts = {name: part.by_patient() for name, part in self.parts.items()}
        return replace(self, slides=first.slides, patients=first.patients, parts=parts, sites=first.sites)

    def with_decisions(self, decisions: Mapping[str, Decision]) -> Self:
        parts = {n: part.decided_by(decisions[n]) if n in decisions else part for n, part in self.parts.items()}
        return replace(self, parts=parts)

    @property
    def _prefixes(self) -> dict[str, str]:
        return prefixes({name: part.columns() for name, part in self.parts.items()})

    def columns(self) -> dict[str, list[Any]]:
        before = self._prefixes
        return {
            before[name] + column: values
            for name, part in self.parts.items()
            for column, values in part.columns().items()
        }

    def declaration(self) -> dict[str, Any]:
        before = self._prefixes
        return {
            name: own | {"prefix": before[name]}
            for name, part in self.parts.items()
            for own in part.declaration().values()
        }


def declaration_of(path: Path) -> Path:
    """The file that says what a table of predictions is of, beside it."""
    return path.with_suffix(".targets.json")


def write_predictions(path: Path, predictions: Predictions) -> None:
    """Write predictions as a table, and beside it the kind, the classes and the decision of each target."""
    write_json(declaration_of(path), {"targets": predictions.declaration()})
    predictions.write(path)


def read_predictions(path: str | Path) -> Predictions:
    """The predictions of a file that any task wrote."""
    path = Path(path)
    table, beside = Table.read(path), declaration_of(path)
    if not beside.is_file():
        return _read(table, _declaration_of_1_0(table))
    try:
        return _read(table, dict(read_json(beside)["targets"]))
    except PredictionsError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PredictionsError(
            f"{beside} does not say what {path.name} is of ({type(error).__name__}: {error}); write both again with "
            "`wsi-train test --overwrite`"
        ) from error


def _read(table: Table, declared: Mapping[str, Mapping[str, Any]]) -> Predictions:
    try:
        parts = {}
        for name, one in declared.items():
            part = KINDS[one["kind"]].of_table(table.part(one["prefix"]), one["classes"])
            cuts = one.get("thresholds")
            parts[name] = part.decided_by(Decision(tuple(map(float, cuts)))) if cuts else part
        return MultiTargetPredictions.of(parts) if len(parts) > 1 else next(iter(parts.values()))
    except PredictionsError as error:  # of values that do not go together, which are checked without the file's name
        raise error if str(table.path) in str(error) else PredictionsError(f"{table.path}: {error}") from error


def _declaration_of_1_0(table: Table) -> dict[str, dict[str, Any]]:
    """The targets of a table that has no file beside it: 1.0 told kinds by their columns."""

    def has(mark: str) -> bool:
        return any(name == mark or (mark.endswith("_") and name.startswith(mark)) for name in table.columns)

    found = {AreaPredictions.TARGET: AreaPredictions.KIND} if has("drawn_") else {}
    if kind := next((kind for mark, kind in _MARKS_OF_1_0.items() if has(mark)), ""):
        found[Predictions.TARGET] = kind
    if not found:
        raise PredictionsError(
            f"{table.path} has none of the columns label, label_<class>, value, risk and drawn_<class>"
        )
    return {name: {"kind": kind, "classes": [], "prefix": ""} for name, kind in found.items()}


def kinds_of(predictions: Predictions) -> Sequence[tuple[str, str]]:
    """The name and the kind of each target."""
    return [(name, part.KIND) for name, part in predictions.by_target.items()]
