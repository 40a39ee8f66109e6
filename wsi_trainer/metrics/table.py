"""Base of all kinds of predictions of a target: one row for each slide, and the CSV file that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.io.display import card, clean, grid, rows
from wsi_trainer.io.frames import frame
from wsi_trainer.io.tables import read_table, unescape_formula, write_table
from wsi_trainer.metrics.decision import Decision

if TYPE_CHECKING:
    from pandas import DataFrame

Score = Callable[[Any], float]
"""From predictions of one kind to a number; NaN where they do not define it."""
Owner = tuple[str, ...]
FIXED = ("classes",)
"""Fields that are the same for all rows."""
FIRST = 5
"""Rows that a notebook shows."""
OWNERS = ("slide", "patient", "site")
"""Columns of the file that are of the slide."""


class PredictionsError(UserError):
    """A file of predictions that cannot be used, with the column or line to change."""


@dataclass(frozen=True)
class Words:
    """A label and a prediction as a reader reads them."""

    label: str
    predicted: str
    probability: float | None = None
    """Of the predicted class, where there are exclusive classes."""
    wrong: bool = False
    """True where another class is predicted than the label; never where there are no classes."""


class Predictions:
    """Rows of one kind. A kind is a frozen dataclass with `slides`, `patients`, its arrays, and `sites`.

    A new kind defines these constants and the methods that raise `NotImplementedError`, and joins `KINDS` in
    `wsi_trainer.metrics`; files, patients, intervals, reports and folds follow from that. `MultiTargetPredictions` has
    one of them for each target.
    """

    KIND: ClassVar[str]
    """Name of the kind in the file that says what a table is of."""
    TARGET: ClassVar[str] = "label"
    """Name of the target, where it is the only one."""
    COLUMNS: ClassVar[Mapping[str, str]] = {}
    """Columns of the file by field; `name_` stands for a column of each class."""
    SCORES: ClassVar[Mapping[str, Score]]
    """The scores of the kind by name; the first stands for all."""
    ERROR: ClassVar[str]
    """Meaning of `errors`, for readers."""
    POSITIVE: ClassVar[str] = "positive"
    """A word for the patients of `positives`, for readers."""
    FIGURES: ClassVar[tuple[str, ...]] = ()
    """Names of the figures of a report."""
    NAMED: ClassVar[bool] = False
    """Whether the words of a label are a name that a reader may look for, not a number."""
    OF_PIXELS: ClassVar[bool] = False
    """Whether the target is of pixels, which are drawn, instead of the slide."""
    slides: Owner
    patients: Owner
    classes: Owner
    sites: Owner

    def __post_init__(self) -> None:
        """Raise an error where the owners or arrays do not go with the slides."""
        rows = len(self.slides)
        if len(self.patients) != rows:
            raise PredictionsError(f"{rows} slides have {len(self.patients)} patients; each slide has one")
        if self.sites and len(self.sites) != rows:
            raise PredictionsError(f"{rows} slides have {len(self.sites)} sites; each slide has one, or none has")
        for name, column in self.COLUMNS.items():
            shape = (rows, len(self.classes)) if column.endswith("_") else (rows,)
            if (found := getattr(self, name).shape) != shape:
                raise PredictionsError(f"{rows} slides have {name} of shape {found}, not {shape}")

    @classmethod
    def of_table(cls, table: Table, classes: Sequence[str] = ()) -> Self:
        """The predictions of a file.

        Args:
            table: The file.
            classes: The names of its classes; by default those of its columns.
        """
        prefixes = [column for column in cls.COLUMNS.values() if column.endswith("_")]
        names = [tuple(classes) or table.classes(prefix) for prefix in prefixes[-1:]]
        arrays = [
            table.numbers([column + its for its in names[0]]) if column.endswith("_") else table.numbers([column])[:, 0]
            for column in cls.COLUMNS.values()
        ]
        return cls(*table.owners, *names, *arrays, table.sites)  # type: ignore[call-arg]

    def columns(self) -> dict[str, list[Any]]:
        """The columns of the file that are of this kind."""
        found: dict[str, list[Any]] = {}
        for name, column in self.COLUMNS.items():
            values = getattr(self, name)
            if column.endswith("_"):
                found |= {column + its: values[:, place].tolist() for place, its in enumerate(self.classes)}
            else:
                found[column] = values.tolist()
        return found

    @property
    def truth(self) -> NDArray[Any]:
        """The target of each row; by default the first field of `COLUMNS`."""
        return getattr(self, next(iter(self.COLUMNS)))

    def of_patient(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """The fields of the one row that stands for all rows of a patient."""
        raise NotImplementedError

    def errors(self) -> NDArray[np.float64]:
        """The error of each prediction, the worst highest."""
        raise NotImplementedError

    def words(self, row: int) -> Words:
        """The label and the prediction of a row."""
        raise NotImplementedError

    def groups(self) -> list[NDArray[np.bool_]]:
        """The rows of each group of which a score needs some, such as each class."""
        return []

    @property
    def positives(self) -> NDArray[np.bool_] | None:
        """The rows of the second of two classes, or with an event; None where there is no such thing."""
        return None

    def by_class(self, scores: Mapping[str, Score]) -> dict[str, dict[str, tuple[Predictions, dict[str, Score]]]]:
        """By a heading of the summary, and by class: the predictions and the scores of one class against the rest.

        Args:
            scores: The scores of all classes.
        """
        return {}

    @property
    def known(self) -> NDArray[np.bool_]:
        """The rows that have a label."""
        return np.ones(len(self), dtype=bool)

    @property
    def labelled(self) -> Self:
        """The rows that have a label: those that scores are of."""
        return self if (known := self.known).all() else self.take(np.flatnonzero(known))

    @property
    def by_target(self) -> Mapping[str, Predictions]:
        """The predictions of each target, of the slides of which it is known; the first one is the main one."""
        return {self.TARGET: self.labelled}

    @property
    def error_means(self) -> str:
        """Meaning of `errors`, for readers."""
        return self.ERROR

    def scored(self, scores: Mapping[str, Score]) -> list[tuple[Predictions, Mapping[str, Score]]]:
        """The predictions of each target with the scores that are of it."""
        return [(self.labelled, scores)]

    def with_decisions(self, decisions: Mapping[str, Decision]) -> Self:
        """The same predictions, decided otherwise.

        Args:
            decisions: By target; a target without one is decided by what is most probable.
        """
        return self if self.TARGET not in decisions else self.decided_by(decisions[self.TARGET])

    def decided_by(self, decision: Decision) -> Self:
        """The same predictions of one target, decided otherwise; those without classes have nothing to decide."""
        return self

    def chosen(self, rule: str) -> Decision | None:
        """The decision that a rule takes on these rows; None where a threshold decides nothing."""
        return None

    def binary(self) -> Mapping[str, Any]:
        """Predictions of two classes that these are or hold: of each label by its name, of two classes by none."""
        return {}

    def declaration(self) -> dict[str, Any]:
        """Everything that the columns of the file do not say of each target, for JSON."""
        return {self.TARGET: {"kind": self.KIND, "classes": list(getattr(self, "classes", ())), "prefix": ""}}

    def __len__(self) -> int:
        return len(self.slides)

    def take(self, rows: NDArray[np.int64]) -> Self:
        """The rows with these indices, in this order, repeats included."""
        return replace(self, **{name: _taken(value, rows) for name, value in _each(self)})  # type: ignore[type-var]

    def by_patient(self) -> Self:
        """One row for each patient."""
        if not len(self):
            return self
        known = self.known
        every = rows_of_patients(self.patients).values()
        rows = [index[known[index]] if known[index].any() else index for index in every]
        first, found = self.take(np.array([index[0] for index in rows])), [self.of_patient(index) for index in rows]
        made = {}
        for name in found[0]:
            like, rows_of = getattr(self, name), [one[name] for one in found]
            made[name] = np.array(rows_of, dtype=like.dtype) if isinstance(like, np.ndarray) else tuple(rows_of)
        return replace(first, slides=first.patients, **made)  # type: ignore[type-var]

    def aligned(self, slides: Sequence[str]) -> Self:
        """The rows of these slides in this order; an error names the first that is missing."""
        index = {slide: row for row, slide in enumerate(self.slides)}
        missing = [slide for slide in slides if slide not in index]
        if missing:
            raise PredictionsError(f"{len(missing)} slides have no prediction, the first is {missing[0]}")
        return self.take(np.array([index[slide] for slide in slides], dtype=np.int64))

    def like(self, other: Predictions) -> Self:
        """The same predictions with classes in the order of others; an error where these have other classes."""
        return self

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, site (where known), then the kind's columns, bit for bit."""
        owners = {"slide": self.slides, "patient": self.patients, **({"site": self.sites} if self.sites else {})}
        columns = owners | self.columns()
        rows = zip(*columns.values(), strict=True)
        cells = ([value if isinstance(value, str) else float(value) for value in row] for row in rows)
        write_table(path, list(columns), cells)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        return cls.of_table(Table.read(path))

    # What a notebook shows.

    def __repr__(self) -> str:
        targets = (f"{name}: {of}" for name, of in self._target_facts.items())
        return "; ".join([self._title, *targets])

    def _repr_html_(self) -> str:
        few = self.take(np.arange(min(len(self), FIRST)))
        columns = {"slide": few.slides, "patient": few.patients, **few.columns()}
        cells = ([clean(one) if isinstance(one, str) else f"{one:.4g}" for one in own] for own in columns.values())
        lines = [list(line) for line in zip(*cells, strict=True)]
        return card(self._title, rows(self._target_facts), grid([*map(clean, columns)], lines))

    @property
    def _title(self) -> str:
        return f"{type(self).__name__}: {len(self)} slides of {len(set(self.patients))} patients"

    @property
    def _target_facts(self) -> dict[str, str]:
        """By target its classes, and how many slides have a label where not all have."""
        classes = {n: ", ".join(map(clean, getattr(p, "classes", ()))) or "a number" for n, p in self.by_target.items()}
        return {
            clean(name): classes[name] + ("" if len(part) == len(self) else f", known of {len(part)}")
            for name, part in self.by_target.items()
        }

    def to_frame(self) -> DataFrame:
        """A table with a row for each slide: the columns of the file, and what is predicted in a word."""
        owners = {"slide": self.slides, "patient": self.patients} | ({"site": self.sites} if self.sites else {})
        words = [self.words(row) for row in range(len(self))]
        predicted, wrong = [one.predicted for one in words], [one.wrong for one in words]
        return frame({**owners, **self.columns(), "predicted": predicted, "wrong": wrong})


Kind = TypeVar("Kind", bound=Predictions)


def join(parts: Sequence[Kind]) -> Kind:
    """The rows of all parts."""
    first = parts[0]
    return replace(  # type: ignore[type-var]
        first, **{name: _joined([getattr(part, name) for part in parts]) for name, _ in _each(first)}
    )


def _each(predictions: Predictions) -> Iterator[tuple[str, Any]]:
    for field in fields(predictions):  # type: ignore[arg-type]
        if field.name not in FIXED:
            yield field.name, getattr(predictions, field.name)


def _taken(value: Any, rows: NDArray[np.int64]) -> Any:
    if isinstance(value, Mapping):
        return {name: part.take(rows) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(value[row] for row in rows) if value else ()
    return None if value is None else value[rows]


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: join([value[name] for value in values]) for name in values[0]}
    if values[0] is None:
        return None
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else tuple(x for value in values for x in value)


def rows_of_patients(patients: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """The rows of each patient, in the order in which patients come first."""
    found: dict[str, list[int]] = {}
    for row, patient in enumerate(patients):
        found.setdefault(patient, []).append(row)
    return {patient: np.array(rows, np.int64) for patient, rows in found.items()}


@dataclass(frozen=True)
class Table:
    """A file of predictions as text."""

    path: Path
    columns: tuple[str, ...]
    rows: list[dict[str, str]]

    @staticmethod
    def read(path: Path) -> Table:
        """The lines of a file of predictions."""
        if not path.is_file():
            raise PredictionsError(f"there are no predictions at {path}; run `wsi-train test` for this run first")
        table = read_table(path)
        Table(path, table.columns, []).need("slide", "patient")
        rows = [{name: unescape_formula(cell) for name, cell in row.items()} for _, row in table.rows]
        return Table(path, table.columns, rows)

    def part(self, prefix: str) -> Table:
        """The columns of the slide, and those that begin with a prefix, without it."""
        if not prefix:
            return self
        names = {name: name for name in OWNERS if name in self.columns}
        names |= {name.removeprefix(prefix): name for name in self.columns if name.startswith(prefix)}
        rows = [{short: row[name] for short, name in names.items()} for row in self.rows]
        return Table(self.path, tuple(names), rows)

    def need(self, *columns: str) -> None:
        """Refuse a table without these columns."""
        if absent := [name for name in columns if name not in self.columns]:
            raise PredictionsError(f"{self.path} lacks the columns {absent}")

    def texts(self, column: str) -> Owner:
        """One column."""
        return tuple(row[column] for row in self.rows)

    def numbers(self, columns: Sequence[str]) -> NDArray[np.float64]:
        """(rows, columns) numbers; an error names the cell that is none."""
        self.need(*columns)
        values = np.empty((len(self.rows), len(columns)))
        for line, row in enumerate(self.rows):
            for place, column in enumerate(columns):
                try:
                    values[line, place] = float(row[column])
                except (ValueError, TypeError) as error:
                    raise PredictionsError(
                        f"{self.path}, line {line + 2}: {column} is {row[column]!r}, not a number"
                    ) from error
        return values

    def classes(self, prefix: str) -> tuple[str, ...]:
        """The names of classes: the columns with a prefix, without it."""
        found = tuple(name.removeprefix(prefix) for name in self.columns if name.startswith(prefix))
        if not found:
            raise PredictionsError(f"{self.path} lacks the columns {[prefix + '<class>']}")
        return found

    @property
    def owners(self) -> tuple[Owner, Owner]:
        """Slides and patients."""
        return self.texts("slide"), self.texts("patient")

    @property
    def sites(self) -> Owner:
        return self.texts("site") if "site" in self.columns else ()
