"""Covariates: columns of the manifest, numbers and categories, that a network takes beside the slide.

A column is fitted on the training slides: a number's mean and standard deviation, a category's values. Those are kept
in the config of the run, so whoever has the config turns cells into the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from wsi_trainer.data.manifest import NO_NAMES, PATHS, SlideRecord
from wsi_trainer.data.splits import first_names
from wsi_trainer.errors import UserError
from wsi_trainer.io.display import clean

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("wsi_trainer")

Kind = Literal["number", "category"]
Absent = Literal["refuse", "missing"]
Cells = Mapping[str, str]
KEY = "model.covariates"
OF_THE_SLIDE = ("slide", "path", "patient", "split", *PATHS)
"""Columns that say which slide it is, and nothing of the patient's condition."""
MOST_CATEGORIES = 20
"""Different values up to which a column whose kind was not given is a category."""


@dataclass(frozen=True)
class Covariate:
    """A column, and the numbers that its cells become."""

    name: str
    kind: Kind | None = None
    """None where the training cells are to tell."""
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()
    fitted: bool = False

    @classmethod
    def of(cls, name: str, said: Any) -> Self:
        """The column as a config has it: its kind, null, or what was fitted."""
        if said is None or said in get_args(Kind):
            return cls(name, said)
        if isinstance(said, Mapping) and set(said) == {"mean", "std"}:
            mean, std = (float(said[key]) for key in ("mean", "std"))
            if not (np.isfinite([mean, std]).all() and std > 0):
                raise ValueError(f"{KEY}.{name} has the mean {mean} and the std {std}; std must be above 0")
            return cls(name, "number", mean, std, fitted=True)
        if isinstance(said, Mapping) and set(said) == {"categories"} and isinstance(said["categories"], list | tuple):
            return cls(name, "category", categories=tuple(map(str, said["categories"])), fitted=True)
        raise ValueError(
            f"{KEY}.{name} is {said}; give number or category, or null to find it out, and `fit` writes the rest"
        )

    @property
    def said(self) -> Any:
        """The column as a config has it."""
        if not self.fitted:
            return self.kind
        return {"mean": self.mean, "std": self.std} if self.kind == "number" else {"categories": list(self.categories)}

    def __str__(self) -> str:
        if not self.fitted:
            return f"{self.name} ({self.kind or 'number or category'})"
        what = f"{self.mean:.4g} ± {self.std:.3g}" if self.kind == "number" else ", ".join(self.categories)
        return clean(f"{self.name} ({self.kind}: {what})")

    @property
    def width(self) -> int:
        """Numbers that a cell becomes: the standardised one, or one for each category; and whether it is missing."""
        return (1 if self.kind == "number" else len(self.categories)) + 1 if self.fitted else 0

    def numbers(self, cell: str, slide: str) -> list[float]:
        """The numbers of a cell; of a missing one the training mean, or no category, and 1 at the end."""
        if is_missing(cell, self.kind):
            return [0.0] * (self.width - 1) + [1.0]
        if self.kind == "number":
            return [(as_number(cell, self.name, slide) - self.mean) / self.std, 0.0]
        if cell not in self.categories:
            _note_unseen(self.name, cell, self.categories)
            return self.numbers("", slide)
        return [float(cell == one) for one in self.categories] + [0.0]

    def fit(self, cells: Sequence[str], slides: Sequence[str]) -> Self:
        """The column with the mean and deviation, or the categories, of these cells."""
        numeric = all(is_number(cell) for cell in cells if not is_missing(cell, "number"))
        kind = self.kind or ("number" if numeric else "category")
        known = [(cell, slide) for cell, slide in zip(cells, slides, strict=True) if not is_missing(cell, kind)]
        values = sorted({cell for cell, _ in known})
        if not known:
            raise UserError(f"{KEY}: the column {self.name!r} is empty in all training slides; leave it out")
        if len(values) == 1:
            log.warning("%s: %s is %s in all training slides, which says nothing", KEY, self.name, clean(values[0]))
        if kind == "number":
            numbers = np.array([as_number(cell, self.name, slide) for cell, slide in known])
            spread = float(numbers.std())
            return replace(self, kind=kind, mean=float(numbers.mean()), std=spread or 1.0, fitted=True)
        if self.kind is None and len(values) > MOST_CATEGORIES:
            raise UserError(
                f"{KEY}: the column {self.name!r} has {len(values)} different values that are no numbers, such as "
                f"{clean(values[0])}; say {self.name}: category if it is one"
            )
        if len(values) > 2 and 3 * len(values) > 2 * len(known):
            raise UserError(
                f"{KEY}: the column {self.name!r} has {len(values)} values in {len(known)} training slides, as a name "
                "has; leave it out"
            )
        return replace(self, kind=kind, categories=tuple(values), fitted=True)


@dataclass(frozen=True)
class Covariates:
    """The columns that a network takes beside the slide, in order."""

    columns: tuple[Covariate, ...] = ()

    @classmethod
    def of(cls, said: Mapping[str, Any] | Sequence[str] | None) -> Self:
        """The columns as a config has them: names, or what is known of each by its name."""
        if said is None:
            return cls()
        columns = said if isinstance(said, Mapping) else dict.fromkeys(said)
        if len(columns) < len(said):
            raise ValueError(f"{KEY} is {list(said)}; name each column once")
        return cls(tuple(Covariate.of(str(name), one) for name, one in columns.items()))

    @property
    def said(self) -> dict[str, Any] | None:
        """The columns as a config has them."""
        return {column.name: column.said for column in self.columns} or None

    def __bool__(self) -> bool:
        return bool(self.columns)

    def __str__(self) -> str:
        return "; ".join(map(str, self.columns))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def fitted(self) -> bool:
        """True where each column's numbers are known, also without any column."""
        return all(column.fitted for column in self.columns)

    @property
    def width(self) -> int:
        """Numbers of a slide."""
        return sum(column.width for column in self.columns)

    def cells(self, given: Mapping[str, object]) -> dict[str, str]:
        """The cells of a slide from values that a program gives.

        Raises:
            UserError: The model takes other columns.
        """
        if set(given) != set(self.names):
            raise UserError(
                f"covariates has {', '.join(map(str, given)) or 'nothing'}, and the model takes "
                f"{', '.join(self.names) or 'none'}; give these, and None for what is missing"
            )
        return {name: "" if value is None else str(value).strip() for name, value in given.items()}

    def like(self, other: Covariates) -> bool:
        """True where another one has these columns, and no other kinds than asked for."""
        return self.names == other.names and all(
            mine.kind in (None, its.kind) for mine, its in zip(self.columns, other.columns, strict=True)
        )

    def fit(self, training: Sequence[SlideRecord], labels: Sequence[str]) -> Self:
        """The columns with the means, deviations and categories of the training slides, whatever was fitted before.

        Args:
            training: The slides, or patients.
            labels: The columns of the targets, which are refused.

        Raises:
            UserError: A column tells the label, the patient or the split; or has no value.
        """
        cells = [cells_of(record) for record in training]
        slides = [record.slide for record in training]
        self._check(training, "refuse")
        told = {
            **{f"the label {name}": [own.get(name, "") for own in cells] for name in labels},
            "the patient": [record.patient for record in training], "the slide": slides,
        }  # fmt: skip
        columns = []
        for column in self.columns:
            own = [one[column.name] for one in cells]
            if column.name in (*OF_THE_SLIDE, *labels):
                what = "the label" if column.name in labels else "which slide it is, and no covariate"
                raise UserError(f"{KEY}: the column {column.name!r} is {what}; leave it out")
            if same := next((what for what, its in told.items() if own == its and len(set(own)) > 1), None):
                raise UserError(f"{KEY}: the column {column.name!r} is {same} in each training slide; leave it out")
            fitted = replace(column, fitted=False, categories=()).fit(own, slides)
            for name in labels:
                if fitted.kind == "category" and _tells(own, [one.get(name, "") for one in cells]):
                    log.warning(
                        "%s: each value of %s has one label of %s in training: it may have been written after the "
                        "diagnosis", KEY, column.name, name,
                    )  # fmt: skip
            columns.append(fitted)
        return type(self)(tuple(columns))

    def table(self, records: Iterable[SlideRecord], absent: Absent = "refuse") -> dict[str, Tensor]:
        """The numbers of slides, (1, width), by the slide; of patients, by the patient. Empty without columns.

        Args:
            records: The slides or patients.
            absent: Whether a column that is not there is refused, or missing of all slides.

        Raises:
            UserError: A column is absent, a number is none, or slides of a patient differ.
        """
        import torch  # a report reads covariates without it

        records = list(records)
        if not self.columns or not self.fitted:
            return {}
        self._check(records, absent)
        rows = {}
        for record in records:
            cells = cells_of(record)
            row = [x for column in self.columns for x in column.numbers(cells.get(column.name, ""), record.slide)]
            rows[record.slide] = torch.tensor([row], dtype=torch.float64).float()
        return rows

    def spread(self, splits: Mapping[str, Sequence[SlideRecord]]) -> list[list[str]]:
        """A row for each number, each category and missing cells of a column, with a cell for each split."""
        rows: list[list[str]] = []
        for column in self.columns:
            cells = [[cells_of(record).get(column.name, "") for record in own] for own in splits.values()]
            known = [[cell for cell in own if not is_missing(cell, column.kind)] for own in cells]
            if column.kind == "number":
                found = [np.array([float(cell) for cell in own if is_number(cell)]) for own in known]
                said = [f"{own.mean():.4g} ± {own.std():.3g}" if len(own) else "none" for own in found]
                rows.append([column.name, *said])
            for one in column.categories:
                rows.append([f"{column.name}: {one}", *(_share(own.count(one), len(own)) for own in cells)])
            if column.kind == "category":
                others = [sum(cell not in column.categories for cell in own) for own in known]
                if any(others):
                    said = [_share(count, len(own)) for count, own in zip(others, cells, strict=True)]
                    rows.append([f"{column.name}: not in training, counted as missing", *said])
            missing = [_share(len(own) - len(there), len(own)) for own, there in zip(cells, known, strict=True)]
            rows.append([f"{column.name}: missing", *missing])
        return rows

    def _check(self, records: Sequence[SlideRecord], absent: Absent) -> None:
        for record in records:
            cells = cells_of(record)
            if absent == "refuse" and (lacking := [name for name in self.names if name not in cells]):
                raise UserError(
                    f"slide {record.slide} has no column {lacking[0]!r}, which the model takes beside the slide "
                    f"({KEY}: {', '.join(self.names)}): give a manifest with it, or --data.absent_covariates missing, "
                    "and it counts as missing of all slides"
                )
            for part in record.parts:
                for name in self.names:
                    if (its := cells_of(part).get(name, "")) != cells.get(name, ""):
                        raise UserError(
                            f"patient {record.patient} has {cells.get(name, '')!r} as {name} of one slide and {its!r} "
                            f"of {part.slide}; with data.group: patient all slides of a patient have one, so give them "
                            "that, or leave out data.group"
                        )


def cells_of(record: SlideRecord) -> Cells:
    """The cells that may be covariates."""
    own = {"slide": record.slide, "patient": record.patient, "split": record.split, "path": str(record.path)}
    return {**own, "site": record.site, **record.cells}


def is_missing(cell: str, kind: Kind | None) -> bool:
    """True for an empty cell, and for what programs write into one: nan, NA, null. A category may be called none."""
    written = cell.casefold()
    return not cell or (written in NO_NAMES and (kind == "number" or written != "none"))


def is_number(cell: str) -> bool:
    """True for a finite number."""
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def as_number(cell: str, column: str, slide: str) -> float:
    """The number in a cell.

    Raises:
        UserError: There is none.
    """
    if not is_number(cell):
        raise UserError(
            f"slide {slide} has {clean(cell)!r} in the column {column!r}, a number in {KEY}; correct it, or leave it "
            "empty where it is not known"
        )
    return float(cell)


def _share(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.0f} %)" if of else "0"


def _tells(cells: Sequence[str], labels: Sequence[str]) -> bool:
    """True where each of a few values comes with one label alone."""
    pairs = {
        (cell, label) for cell, label in zip(cells, labels, strict=True) if not is_missing(cell, "category") and label
    }
    values = {cell for cell, _ in pairs}
    return len(pairs) == len(values) > 1 and 4 * len(values) <= len(cells) and len({label for _, label in pairs}) > 1


@cache
def _note_unseen(column: str, value: str, known: tuple[str, ...]) -> None:
    log.warning(
        "%s: the training slides have no %s %s, only %s: it counts as missing",
        KEY, clean(column), clean(value), clean(first_names(known)),
    )  # fmt: skip
