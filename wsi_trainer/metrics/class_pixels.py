"""Numbers of pixels of each class, one row for each slide, as arrays and as a CSV file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.table import (
    Columns,
    PredictionsError,
    check_rows,
    owners_of_rows,
    read_rows,
    rows_of_patients,
    write_rows,
)


@dataclass(frozen=True)
class ClassPixels:
    """Pixels of each class, one row for each slide (or each patient): those that count, whatever was ignored."""

    KINDS: ClassVar[tuple[str, ...]]
    """What is counted of each class."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    pixels: NDArray[np.float64]
    """(rows, kinds, classes)."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rows(len(self.slides), self.patients, self.sites)
        wanted = (len(self), len(self.KINDS), len(self.classes))
        if self.pixels.shape != wanted:
            raise PredictionsError(f"pixels have the shape {self.pixels.shape}, not {wanted}")

    def __len__(self) -> int:
        return len(self.slides)

    @property
    def truth(self) -> NDArray[np.float64]:
        """What is true of each row: the pixels that are drawn."""
        return self.pixels[:, self.KINDS.index("drawn")]

    def take(self, rows: NDArray[np.int64]) -> Self:
        """The rows with these indices, in this order, repeats included."""
        return replace(self, **owners_of_rows(self, rows), pixels=self.pixels[rows])

    def by_patient(self) -> Self:
        """One row for each patient: the pixels of all slides."""
        rows = rows_of_patients(self.patients)
        first = self.take(np.array([index[0] for index in rows.values()]))
        pixels = np.stack([self.pixels[index].sum(axis=0) for index in rows.values()])
        return replace(first, slides=first.patients, pixels=pixels)

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, and of each kind a column <kind>_<class> for each class."""
        write_rows(path, self, *self.columns())

    def columns(self) -> Columns:
        """The columns of the file that are of this kind."""
        names = [f"{kind}_{name}" for kind in self.KINDS for name in self.classes]
        return names, self.pixels.reshape(len(self), -1).tolist()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        table, first = read_rows(path), f"{cls.KINDS[0]}_"
        classes = tuple(name.removeprefix(first) for name in table.columns if name.startswith(first))
        columns = [f"{kind}_{name}" for kind in cls.KINDS for name in classes]
        absent = [name for name in columns if name not in table.columns]
        if absent:
            raise PredictionsError(f"{path} lacks the columns {absent}")
        numbers = table.numbers(columns).reshape(len(table.rows), len(cls.KINDS), len(classes))
        return cls(table.texts("slide"), table.texts("patient"), classes, numbers, table.sites)


def mean(values: NDArray[np.float64]) -> float:
    """The mean of what is known; NaN where nothing is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
