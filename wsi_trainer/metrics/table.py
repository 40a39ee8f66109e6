"""The CSV file of predictions, whatever was predicted: one line for each slide, its name and patient first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.tables import lively, read_table, write_table


class PredictionsError(UserError):
    """A file of predictions that cannot be used, with the column or line to change."""


Columns = tuple[list[str], Sequence[Sequence[Any]]]
"""Names of columns, and row by row their values."""


class Owned(Protocol):
    """Rows of slides, each of a patient and perhaps of a site."""

    @property
    def slides(self) -> tuple[str, ...]: ...

    @property
    def patients(self) -> tuple[str, ...]: ...

    @property
    def sites(self) -> tuple[str, ...]: ...


class Rows(Owned, Protocol):
    """What all kinds of predictions have."""

    @property
    def truth(self) -> NDArray[Any]:
        """What is true of each row, whatever was predicted."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: NDArray[np.int64]) -> Self: ...

    def by_patient(self) -> Self: ...


AnyRows = TypeVar("AnyRows", bound=Rows)


def owners_of_rows(rows: Owned, index: NDArray[np.int64]) -> dict[str, tuple[str, ...]]:
    """Slides, patients and sites of the rows with these indices, by the names of their fields."""
    sites = tuple(rows.sites[i] for i in index) if rows.sites else ()
    return {
        "slides": tuple(rows.slides[i] for i in index),
        "patients": tuple(rows.patients[i] for i in index),
        "sites": sites,
    }


def aligned(predictions: AnyRows, slides: Sequence[str]) -> AnyRows:
    """The rows of these slides in this order; an error names the first that is missing."""
    index = {slide: row for row, slide in enumerate(predictions.slides)}
    missing = [slide for slide in slides if slide not in index]
    if missing:
        raise PredictionsError(f"{len(missing)} slides have no prediction, the first is {missing[0]}")
    return predictions.take(np.array([index[slide] for slide in slides], dtype=np.int64))


def rows_of_patients(patients: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """The rows of each patient, in the order in which patients come first."""
    owners = np.array(patients)
    return {patient: np.flatnonzero(owners == patient) for patient in dict.fromkeys(patients)}


def check_rows(rows: int, patients: Sequence[str], sites: Sequence[str]) -> None:
    """Raise an error where patients or sites do not go with the slides."""
    if len(patients) != rows:
        raise PredictionsError(f"{rows} slides have {len(patients)} patients; each slide has one")
    if sites and len(sites) != rows:
        raise PredictionsError(f"{rows} slides have {len(sites)} sites; each slide has one, or none has")


def write_rows(path: Path, rows: Rows, columns: Sequence[str], values: Sequence[Sequence[Any]]) -> None:
    """Write slide, patient and site (where known), then these columns; numbers are written bit for bit."""
    site = ["site"] if rows.sites else []
    cells = (
        [
            rows.slides[index],
            rows.patients[index],
            *([rows.sites[index]] if site else []),
            *(value if isinstance(value, str) else float(value) for value in line),
        ]
        for index, line in enumerate(values)
    )
    write_table(path, ["slide", "patient", *site, *columns], cells)


@dataclass(frozen=True)
class Table:
    """A file of predictions as text."""

    path: Path
    columns: tuple[str, ...]
    rows: list[dict[str, str]]

    def texts(self, column: str) -> tuple[str, ...]:
        """One column."""
        return tuple(row[column] for row in self.rows)

    def numbers(self, columns: Sequence[str]) -> NDArray[np.float64]:
        """(rows, columns) numbers; an error names the cell that is none."""
        values = np.empty((len(self.rows), len(columns)))
        for index, row in enumerate(self.rows):
            for place, column in enumerate(columns):
                try:
                    values[index, place] = float(row[column])
                except (ValueError, TypeError) as error:
                    raise PredictionsError(
                        f"{self.path}, line {index + 2}: {column} is {row[column]!r}, not a number"
                    ) from error
        return values

    @property
    def sites(self) -> tuple[str, ...]:
        return self.texts("site") if "site" in self.columns else ()


def read_rows(path: Path) -> Table:
    """The lines of a file of predictions."""
    if not path.is_file():
        raise PredictionsError(f"there are no predictions at {path}; run `wsi-train test` for this run first")
    table = read_table(path)
    if absent := {"slide", "patient"} - set(table.columns):
        raise PredictionsError(f"{path} lacks the columns {sorted(absent)}")
    return Table(path, table.columns, [{name: lively(cell) for name, cell in row.items()} for _, row in table.rows])
