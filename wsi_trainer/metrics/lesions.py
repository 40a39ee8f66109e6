"""Which lesions were detected, and what was detected that is none, as arrays and as a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.table import (
    PredictionsError,
    check_rows,
    owners_of_rows,
    read_rows,
    rows_of_patients,
    write_rows,
)

MISSED = -np.inf
"""The probability of a lesion that no detection lies in."""
_LESIONS, _FALSE = "lesions_", "false_"


@dataclass(frozen=True, eq=False)
class Marks:
    """The lesions and the false positives of a class on a slide."""

    lesions: NDArray[np.float64]
    """Of each lesion the highest probability of a detection in it, or `MISSED`."""
    false: NDArray[np.float64]
    """The probability of each detection that lies in no lesion."""


@dataclass(frozen=True)
class LesionPredictions:
    """The marks of each class, one row for each slide (or each patient)."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    marks: tuple[tuple[Marks, ...], ...]
    """Row by row, those of each class."""
    images: NDArray[np.int64]
    """How many slides a row stands for."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rows(len(self.slides), self.patients, self.sites)
        wrong = [slide for slide, row in zip(self.slides, self.marks, strict=True) if len(row) != len(self.classes)]
        if wrong:
            raise PredictionsError(f"slide {wrong[0]} has not the marks of {len(self.classes)} classes")

    def __len__(self) -> int:
        return len(self.slides)

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
        """What is true of each row: how many lesions are drawn."""
        return np.array([[len(one.lesions) for one in row] for row in self.marks], np.int64)

    def take(self, rows: NDArray[np.int64]) -> LesionPredictions:
        """The rows with these indices, in this order, repeats included."""
        marks = tuple(self.marks[i] for i in rows)
        return replace(self, **owners_of_rows(self, rows), marks=marks, images=self.images[rows])

    def by_patient(self) -> LesionPredictions:
        """One row for each patient: the marks of all slides."""
        rows = rows_of_patients(self.patients).values()
        first = self.take(np.array([index[0] for index in rows]))
        marks = tuple(tuple(self._together(index, place) for place in range(len(self.classes))) for index in rows)
        images = np.array([self.images[index].sum() for index in rows], np.int64)
        return replace(first, slides=first.patients, marks=marks, images=images)

    def of(self, name: str) -> LesionPredictions:
        """One class by itself."""
        place = self.classes.index(name)
        return replace(self, classes=(name,), marks=tuple((row[place],) for row in self.marks))

    def all_of(self, place: int) -> Marks:
        """The marks of a class on all slides."""
        return self._together(range(len(self)), place)

    def _together(self, rows: Iterable[int], place: int) -> Marks:
        marks = [self.marks[row][place] for row in rows]
        return Marks(*(np.concatenate([getattr(m, kind) for m in marks]) for kind in ("lesions", "false")))

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, lesions_<class> ..., false_<class> ..., probabilities with spaces."""
        columns = [f"{kind}{name}" for kind in (_LESIONS, _FALSE) for name in self.classes]
        lines = [[*(_text(one.lesions) for one in row), *(_text(one.false) for one in row)] for row in self.marks]
        write_rows(path, self, columns, lines)

    @staticmethod
    def read(path: Path) -> LesionPredictions:
        """Read what `write` wrote of slides."""
        table = read_rows(path)
        classes = tuple(name.removeprefix(_LESIONS) for name in table.columns if name.startswith(_LESIONS))
        absent = [_FALSE + name for name in classes if _FALSE + name not in table.columns]
        if absent or not classes:
            raise PredictionsError(f"{path} lacks the columns {absent or [_LESIONS + '<class>']}")
        marks = []
        for line, row in enumerate(table.rows, start=2):
            try:
                marks.append(tuple(Marks(_numbers(row[_LESIONS + n]), _numbers(row[_FALSE + n])) for n in classes))
            except (ValueError, AttributeError) as error:
                raise PredictionsError(
                    f"{path}, line {line}: marks are numbers with spaces between ({error})"
                ) from error
        return LesionPredictions.of_slides(table.texts("slide"), table.texts("patient"), classes, marks, table.sites)


def _text(values: NDArray[np.float64]) -> str:
    return " ".join(map(repr, values.tolist()))


def _numbers(text: str) -> NDArray[np.float64]:
    return np.array([float(word) for word in text.split()], np.float64)
