"""Which kind of predictions a file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wsi_trainer.metrics.areas import AreaPredictions
from wsi_trainer.metrics.joint import JointPredictions, LabelPredictions
from wsi_trainer.metrics.multilabel import MultiLabelPredictions
from wsi_trainer.metrics.predictions import Predictions
from wsi_trainer.metrics.regression import ValuePredictions
from wsi_trainer.metrics.survival import RiskPredictions
from wsi_trainer.metrics.table import PredictionsError, read_rows

AnyPredictions = (
    Predictions | MultiLabelPredictions | ValuePredictions | RiskPredictions | AreaPredictions | JointPredictions
)


def read_predictions(path: Path) -> AnyPredictions:
    """The predictions of a file that any task wrote, told apart by its columns."""
    try:
        return _read(path)
    except PredictionsError as error:  # of values that do not go together, which are checked without the file's name
        if str(path) in str(error):
            raise
        raise PredictionsError(f"{path}: {error}") from error


def _read(path: Path) -> AnyPredictions:
    columns = read_rows(path).columns
    labels = _read_labels(path, columns)
    if any(name.startswith("drawn_") for name in columns):
        areas = AreaPredictions.read(path)
        return areas if labels is None else JointPredictions(areas, labels)
    if labels is None:
        raise PredictionsError(f"{path} has none of the columns label, label_<class>, value, risk and drawn_<class>")
    return labels


def _read_labels(path: Path, columns: Sequence[str]) -> LabelPredictions | None:
    """The predictions of targets of slides, if the file has any."""
    if "risk" in columns:
        return RiskPredictions.read(path)
    if "value" in columns:
        return ValuePredictions.read(path)
    if "label" in columns:
        return Predictions.read(path)
    if any(name.startswith("label_") for name in columns):
        return MultiLabelPredictions.read(path)
    return None
