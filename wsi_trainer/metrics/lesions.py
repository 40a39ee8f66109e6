"""Detected lesions and false positives, their file, and FROC as CAMELYON16 counts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wsi_trainer.metrics.pixels import mean
from wsi_trainer.metrics.table import Predictions, PredictionsError, Score, Table

MISSED = -np.inf
"""The probability of a lesion that no detection lies in."""
RATES: Mapping[str, float] = {"1/4": 1 / 4, "1/2": 1 / 2, "1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0}
"""False positives for each slide at which sensitivity is said."""
_LESIONS, _FALSE = "lesions_", "false_"
_WHOLE = 1e-9


@dataclass(frozen=True, eq=False)
class Marks:
    """The lesions and the false positives of a class on a slide."""

    lesions: NDArray[np.float64]
    """Of each lesion the highest probability of a detection in it, or `MISSED`."""
    false: NDArray[np.float64]
    """The probability of each detection that lies in no lesion."""


def sensitivity(predictions: LesionPredictions, place: int, rates: ArrayLike) -> NDArray[np.float64]:
    """The share of a class's lesions that is detected where there may be so many false positives for each slide.

    The threshold is the lowest that makes no more of them: between thresholds nothing is interpolated. NaN where there
    is no lesion.
    """
    marks = predictions.together(range(len(predictions)), place)
    allowed = np.floor(np.asarray(rates, np.float64) * predictions.images.sum() + _WHOLE).astype(np.int64)
    if not len(marks.lesions):
        return np.full(allowed.shape, np.nan)
    # The threshold has to lie above the first false positive that is too many, if there is one.
    beyond = np.append(np.sort(marks.false)[::-1], MISSED)
    lowest = beyond[np.minimum(allowed, len(marks.false))]
    return (marks.lesions > lowest[..., None]).mean(axis=-1)


def found_at(predictions: LesionPredictions, rate: float) -> float:
    """The mean over classes of the sensitivity at a rate."""
    return mean(np.array([sensitivity(predictions, place, rate) for place in range(len(predictions.classes))]))


def froc(predictions: LesionPredictions) -> float:
    """The mean over classes of the mean sensitivity at `RATES`: the score of CAMELYON16."""
    rates = list(RATES.values())
    return mean(np.array([sensitivity(predictions, place, rates).mean() for place in range(len(predictions.classes))]))


FROC_SCORES: Mapping[str, Score] = {
    "froc": froc,
    **{name: partial(found_at, rate=rate) for name, rate in RATES.items()},
}


@dataclass(frozen=True, repr=False)
class LesionPredictions(Predictions):
    """The marks of each class, one row for each slide (or each patient)."""

    SCORES = FROC_SCORES

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    marks: tuple[tuple[Marks, ...], ...]
    """Row by row, those of each class."""
    images: NDArray[np.int64]
    """Number of slides that a row stands for."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [slide for slide, row in zip(self.slides, self.marks, strict=True) if len(row) != len(self.classes)]
        if wrong:
            raise PredictionsError(f"slide {wrong[0]} has not the marks of {len(self.classes)} classes")

    @staticmethod
    def of_slides(
        slides: tuple[str, ...],
        patients: tuple[str, ...],
        classes: tuple[str, ...],
        marks: Sequence[tuple[Marks, ...]],
        sites: tuple[str, ...] = (),
    ) -> LesionPredictions:
        """One row for each slide."""
        return LesionPredictions(slides, patients, classes, tuple(marks), np.ones(len(slides), np.int64), sites)

    @property
    def truth(self) -> NDArray[np.int64]:
        """Numbers of drawn lesions of each class."""
        return np.array([[len(one.lesions) for one in row] for row in self.marks], np.int64)

    def of_patient(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """The marks of all slides."""
        marks = tuple(self.together(rows, place) for place in range(len(self.classes)))
        return {"marks": marks, "images": self.images[rows].sum()}

    def groups(self) -> list[NDArray[np.bool_]]:
        return [*(self.truth > 0).T]

    def by_class(self, scores: Mapping[str, Score]) -> dict[str, dict[str, tuple[Predictions, dict[str, Score]]]]:
        return {"per_class": {name: (self.of(name), dict(scores)) for name in self.classes}}

    def of(self, name: str) -> LesionPredictions:
        """One class by itself."""
        place = self.classes.index(name)
        return replace(self, classes=(name,), marks=tuple((row[place],) for row in self.marks))

    def together(self, rows: Iterable[int], place: int) -> Marks:
        """The marks of a class on some slides."""
        marks = [self.marks[row][place] for row in rows]
        return Marks(*(np.concatenate([getattr(m, kind) for m in marks]) for kind in ("lesions", "false")))

    def columns(self) -> dict[str, list[Any]]:
        """For each class lesions_<class>, then false_<class>: probabilities with spaces between."""
        lesions, false = {}, {}
        for name, marks in zip(self.classes, zip(*self.marks, strict=True), strict=True):
            lesions[_LESIONS + name] = [_text(its.lesions) for its in marks]
            false[_FALSE + name] = [_text(its.false) for its in marks]
        return lesions | false

    @classmethod
    def of_table(cls, table: Table, classes: Sequence[str] = ()) -> LesionPredictions:
        classes = tuple(classes) or table.classes(_LESIONS)
        table.need(*(_FALSE + name for name in classes))
        marks = []
        for line, row in enumerate(table.rows, start=2):
            try:
                marks.append(tuple(Marks(_numbers(row[_LESIONS + n]), _numbers(row[_FALSE + n])) for n in classes))
            except ValueError as error:
                raise PredictionsError(
                    f"{table.path}, line {line}: marks are numbers with spaces between ({error})"
                ) from error
        return cls.of_slides(*table.owners, classes, marks, table.sites)


def _text(values: NDArray[np.float64]) -> str:
    return " ".join(map(repr, values.tolist()))


def _numbers(text: str) -> NDArray[np.float64]:
    return np.array([float(word) for word in text.split()], np.float64)
