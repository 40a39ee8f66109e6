"""Predictions of patients as STAMP writes them, as tables of this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.io.tables import read_table
from wsi_trainer.metrics import (
    ClassPredictions,
    MultiTargetPredictions,
    Predictions,
    PredictionsError,
    RiskPredictions,
    ValuePredictions,
)
from wsi_trainer.metrics.table import Table, join

FILE = "patient-preds.csv"


def read_stamp(path: str | Path) -> Predictions:
    """The predictions of a file that STAMP wrote, a row for each patient.

    Args:
        path: patient-preds.csv; or the folder of a cross-validation, of which all folds are joined.

    Raises:
        PredictionsError: It is no such file, or has a cell that is no number.
    """
    path = Path(path)
    if not path.exists():
        raise PredictionsError(f"there is nothing at {path}; give the folder of a cross-validation, or {FILE}")
    if not path.is_dir():
        return _read(path)
    folds = sorted(path.glob(f"split-*/{FILE}"), key=lambda one: (len(one.parent.name), one.parent.name))
    if not folds:
        raise PredictionsError(f"{path} has no split-0/{FILE}; give the folder of a cross-validation, or the file")
    first, *others = [_read(fold) for fold in folds]
    return join([first, *(one.like(first) for one in others)])


def _read(path: Path) -> Predictions:
    read = read_table(path)
    table = Table(path, read.columns, [row for _, row in read.rows])
    columns = table.columns
    if "pred_score" in columns:
        return _risks(table)
    # A target has a column for what is predicted, and behind it those of its classes: names may begin alike.
    starts = [place for place, name in enumerate(columns) if name == "pred" or name.startswith("pred_")]
    if not starts or "loss" not in columns or columns[0] in ("pred", "loss"):
        raise PredictionsError(
            f"{path} is no {FILE} of STAMP: it has neither pred and loss, nor pred_score; STAMP's crossval and deploy "
            "write it"
        )
    ends = [*starts[1:], columns.index("loss")]
    targets = [columns[1] if columns[at] == "pred" else columns[at].removeprefix("pred_") for at in starts]
    parts = {
        target: _of_target(table, target, columns[start], columns[start + 1 : end])
        for target, start, end in zip(targets, starts, ends, strict=True)
    }
    return MultiTargetPredictions.of(parts) if len(parts) > 1 else next(iter(parts.values()))


def _of_target(table: Table, target: str, said: str, columns: Sequence[str]) -> Predictions:
    patients = table.texts(table.columns[0])
    if not columns:
        return ValuePredictions(patients, patients, _or_nan(table, target), table.numbers([said])[:, 0])
    classes = tuple(name.removeprefix(f"{target}_") for name in columns)
    known = {name: place for place, name in enumerate(classes)} | {"": -1}
    labels = table.texts(target)
    if strange := [label for label in labels if label not in known]:
        raise PredictionsError(f"{table.path}: {target} is {strange[0]!r}, which is none of {', '.join(classes)}")
    places = np.array([known[label] for label in labels])
    return ClassPredictions(patients, patients, classes, places, table.numbers(list(columns)))


def _risks(table: Table) -> RiskPredictions:
    """Of a survival: columns of patient, risk, time and status, in this order, and the cut of groups by name."""
    if len(table.columns) < 4 or table.columns[1] != "pred_score":
        raise PredictionsError(f"{table.path} has no columns of patient, pred_score, time and status, in this order")
    patients, (time, status) = table.texts(table.columns[0]), table.columns[2:4]
    cut = next((name.removeprefix("cut_off=") for name in table.columns[4:] if name.startswith("cut_off=")), "")
    return RiskPredictions(
        patients, patients, _or_nan(table, time), np.nan_to_num(_or_nan(table, status)) > 0,
        table.numbers(["pred_score"])[:, 0], cuts=np.full(len(patients), float(cut)) if cut else None,
    )  # fmt: skip


def _or_nan(table: Table, column: str) -> NDArray[np.float64]:
    """Numbers of a column; NaN where the cell is empty."""
    rows = [{column: row[column] or "nan"} for row in table.rows]
    return Table(table.path, (column,), rows).numbers([column])[:, 0]
