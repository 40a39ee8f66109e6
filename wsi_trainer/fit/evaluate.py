"""From a trained model to predictions and scores with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl

from wsi_trainer.data import SlideData, SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.metrics import SCORES, Interval, Predictions, PredictionsError, score_intervals
from wsi_trainer.models import SlideClassifier


def predict(trainer: pl.Trainer, model: SlideClassifier, data: SlideData, split: str) -> Predictions:
    """The model's predictions of all slides of a split."""
    records = data.of(split)
    if not records:
        raise UserError(f"no slide is in the split {split}; the splits of this run are in its splits.csv")
    outputs = trainer.predict(model, dataloaders=data.loader(split))
    assert outputs is not None
    probabilities = np.concatenate([np.asarray(output, dtype=np.float64) for output in outputs])
    return as_predictions(records, model.task.classes, probabilities)


def as_predictions(records: Sequence[SlideRecord], classes: Sequence[str], probabilities: np.ndarray) -> Predictions:
    """Join what the manifest knows of the slides to what the model said."""
    labels = np.array([classes.index(record.label) for record in records], dtype=np.int64)
    slides = tuple(record.slide for record in records)
    patients = tuple(record.patient for record in records)
    return Predictions(slides, patients, tuple(classes), labels, probabilities)


def evaluate(predictions: Predictions, resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """All scores with their intervals, for slides and for patients, as JSON."""
    result: dict[str, Any] = {
        "slides": len(predictions),
        "patients": len(set(predictions.patients)),
        "classes": list(predictions.classes),
        "slide": _plain(score_intervals(predictions, SCORES, resamples, seed)),
    }
    try:
        patients = predictions.by_patient()
    except PredictionsError as error:
        result["patient_absent"] = str(error)
    else:
        result["patient"] = _plain(score_intervals(patients, SCORES, resamples, seed))
    return result


def _plain(intervals: dict[str, Interval]) -> dict[str, dict[str, float]]:
    return {name: interval.to_dict() for name, interval in intervals.items()}
