"""All scores of a set of predictions, as JSON: of slides, of patients, of each class and of each site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from wsi_trainer.metrics.areas import AreaPredictions, class_ratio
from wsi_trainer.metrics.bootstrap import score_intervals
from wsi_trainer.metrics.borders import BORDER_KINDS, BorderPredictions, class_border
from wsi_trainer.metrics.joint import PREFIX, JointPredictions
from wsi_trainer.metrics.lesions import LesionPredictions
from wsi_trainer.metrics.multilabel import MultiLabelPredictions
from wsi_trainer.metrics.predictions import Predictions
from wsi_trainer.metrics.scores import SCORES, Score, area_under_roc, confusion, precision_averaged
from wsi_trainer.metrics.table import PredictionsError, Rows

CLASS_RATIOS = ("dice", "iou", "recall", "precision")
Intervals = dict[str, dict[str, float]]
"""Scores by name, each as `Interval.to_dict`: value, low, high, resamples."""


def summarise(predictions: Rows, scores: Mapping[str, Score], resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Every score with its 95 % interval by bootstrap over patients.

    Returns:
        `slides` and `patients` (how many); `classes` (names, where there are classes); `slide` and `patient`
        (`Intervals` of the rows and of the patients; `patient_absent` says why where patients cannot be scored);
        `per_class` (`Intervals` of each class against the rest, by class; `label_per_class` are those of the slide's
        target where pixels have classes too); `per_site` (by site, where the manifest
        names at least two: `slides`, `patients` and `slide`).
    """
    intervals = partial(_intervals, resamples=resamples, seed=seed)
    result: dict[str, Any] = {
        "slides": len(predictions),
        "patients": len(set(predictions.patients)),
        "classes": list(getattr(predictions, "classes", ())),
        "slide": intervals(predictions, scores),
    }
    try:
        result["patient"] = intervals(predictions.by_patient(), scores)
    except PredictionsError as error:
        result["patient_absent"] = str(error)
    if isinstance(predictions, Predictions):
        result["per_class"] = {
            name: intervals(predictions, class_scores(index)) for index, name in enumerate(predictions.classes)
        }
    if isinstance(predictions, MultiLabelPredictions):
        result["per_class"] = {name: intervals(predictions.of(name), SCORES) for name in predictions.classes}
    if isinstance(predictions, LesionPredictions):
        result["per_class"] = {name: intervals(predictions.of(name), scores) for name in predictions.classes}
    if isinstance(predictions, BorderPredictions):
        result["per_class"] = {
            name: intervals(predictions, {kind: partial(class_border, place=place, kind=kind) for kind in BORDER_KINDS})
            for place, name in enumerate(predictions.classes)
        }
    if isinstance(predictions, AreaPredictions):
        result["per_class"] = {
            name: intervals(predictions, {kind: partial(class_ratio, place=place, kind=kind) for kind in CLASS_RATIOS})
            for place, name in enumerate(predictions.classes)
        }
    if isinstance(predictions, JointPredictions):
        parts = {"": predictions.areas, PREFIX: predictions.labels}
        for prefix, part in parts.items():
            if classes := summarise(part, {}, resamples, seed).get("per_class"):
                result[f"{prefix}per_class"] = classes
    return result | _by_site(predictions, scores, intervals)


def class_scores(index: int) -> dict[str, Score]:
    """The scores of one class against the rest; a slide counts as predicted to be of its most probable class."""

    def one_against_rest(predictions: Predictions, score: Callable[..., float]) -> float:
        return score(predictions.labels == index, predictions.probabilities[:, index])

    def share(predictions: Predictions, axis: int) -> float:
        counts = confusion(predictions)
        total = counts.sum(axis=axis)[index]
        return float(counts[index, index] / total) if total else float("nan")

    return {
        "auc": partial(one_against_rest, score=area_under_roc),
        "average_precision": partial(one_against_rest, score=precision_averaged),
        "recall": partial(share, axis=1),
        "precision": partial(share, axis=0),
    }


def _by_site(predictions: Rows, scores: Mapping[str, Score], intervals: Callable[..., Intervals]) -> dict[str, Any]:
    sites = np.array(predictions.sites)
    names = sorted(set(predictions.sites) - {""})
    if len(names) < 2:
        return {}
    parts = {name: predictions.take(np.flatnonzero(sites == name)) for name in names}
    return {
        "per_site": {
            name: {"slides": len(part), "patients": len(set(part.patients)), "slide": intervals(part, scores)}
            for name, part in parts.items()
        }
    }


def _intervals(predictions: Rows, scores: Mapping[str, Score], resamples: int, seed: int) -> Intervals:
    drawn = score_intervals(predictions, scores, resamples, seed)
    return {name: interval.to_dict() for name, interval in drawn.items()}
