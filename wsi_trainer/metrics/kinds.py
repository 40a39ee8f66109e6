"""Which kind of predictions a file holds."""

from __future__ import annotations

from pathlib import Path

from wsi_trainer.metrics.areas import AreaPredictions
from wsi_trainer.metrics.multilabel import MultiLabelPredictions
from wsi_trainer.metrics.predictions import Predictions
from wsi_trainer.metrics.regression import ValuePredictions
from wsi_trainer.metrics.survival import RiskPredictions
from wsi_trainer.metrics.table import PredictionsError, read_rows

AnyPredictions = Predictions | MultiLabelPredictions | ValuePredictions | RiskPredictions | AreaPredictions


def read_predictions(path: Path) -> AnyPredictions:
    """The predictions of a file that any task wrote, told apart by its columns."""
    columns = read_rows(path).columns
    if "risk" in columns:
        return RiskPredictions.read(path)
    if "value" in columns:
        return ValuePredictions.read(path)
    if "label" in columns:
        return Predictions.read(path)
    if any(name.startswith("label_") for name in columns):
        return MultiLabelPredictions.read(path)
    if any(name.startswith("drawn_") for name in columns):
        return AreaPredictions.read(path)
    raise PredictionsError(f"{path} has none of the columns label, label_<class>, value, risk and drawn_<class>")
