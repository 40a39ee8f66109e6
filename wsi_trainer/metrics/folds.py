"""What the folds of a cross-validation say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from wsi_trainer.metrics.areas import AreaPredictions
from wsi_trainer.metrics.bootstrap import score_intervals
from wsi_trainer.metrics.joint import JointPredictions
from wsi_trainer.metrics.kinds import AnyPredictions
from wsi_trainer.metrics.multilabel import MultiLabelPredictions
from wsi_trainer.metrics.predictions import Predictions
from wsi_trainer.metrics.scores import Score
from wsi_trainer.metrics.table import PredictionsError

Kind = TypeVar("Kind", bound=AnyPredictions)


def cross_validation(
    folds: Sequence[Kind], scores: Mapping[str, Score], resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """The scores of each fold's held-out slides, their mean and spread, and the scores of all of them pooled.

    Returns:
        `folds` (a list with `slides` and `slide`: score by name), `mean` and `sd` (score by name; the standard
        deviation between folds, which is no interval of the mean: folds share their training slides), `pooled`
        (score by name with its 95 % interval by bootstrap over patients, all held-out slides together: the models of
        the folds differ, so it also asks whether their predictions are on one scale).
    """
    each = [{name: score(fold) for name, score in scores.items()} for fold in folds]
    pooled = score_intervals(join(folds), scores, resamples, seed)
    return {
        "folds": [{"slides": len(fold), "slide": values} for fold, values in zip(folds, each)],
        "mean": {name: float(np.mean([values[name] for values in each])) for name in scores},
        "sd": {name: float(np.std([values[name] for values in each], ddof=1)) for name in scores},
        "pooled": {name: interval.to_dict() for name, interval in pooled.items()},
    }


def join(folds: Sequence[Kind]) -> Kind:
    """The held-out slides of all folds; an error names a slide that two folds hold out."""
    if len(folds) < 2:
        raise PredictionsError(f"there are {len(folds)} folds; a cross-validation has at least 2")
    seen: dict[str, int] = {}
    for number, fold in enumerate(folds):
        for slide in fold.slides:
            if slide in seen:
                raise PredictionsError(f"slide {slide} is held out in the folds {seen[slide]} and {number}")
            seen[slide] = number
    return _joined(folds)


def _joined(folds: Sequence[Kind]) -> Kind:
    first = folds[0]
    if isinstance(first, JointPredictions):
        both = [fold for fold in folds if isinstance(fold, JointPredictions)]
        return type(first)(_joined([fold.areas for fold in both]), _joined([fold.labels for fold in both]))
    names = [field.name for field in fields(first) if field.name != "classes"]
    values: dict[str, Any] = {}
    for name in names:
        parts = [getattr(fold, name) for fold in folds]
        values[name] = np.concatenate(parts) if isinstance(parts[0], np.ndarray) else tuple(x for p in parts for x in p)
    if isinstance(first, (Predictions, MultiLabelPredictions, AreaPredictions)):
        values["classes"] = first.classes
    return type(first)(**values)
