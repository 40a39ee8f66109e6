"""Scores of a set of predictions. Each is a number, or NaN where the predictions do not define it.

They are written with NumPy: a bootstrap asks for each a thousand times, and checking arguments would take most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.predictions import Predictions

Score = Callable[[Any], float]
"""From predictions of one kind to a number."""


def auc(predictions: Predictions) -> float:
    """Area under the ROC curve; with several classes the mean over one-against-rest."""
    return _mean_over_classes(predictions, area_under_roc)


def average_precision(predictions: Predictions) -> float:
    """Average precision; with several classes the mean over one-against-rest."""
    return _mean_over_classes(predictions, precision_averaged)


def balanced_accuracy(predictions: Predictions) -> float:
    """The mean over classes of the share of its slides that are predicted right."""
    counts = confusion(predictions)
    present = counts.sum(axis=1) > 0
    return float((counts.diagonal()[present] / counts.sum(axis=1)[present]).mean())


def f1(predictions: Predictions) -> float:
    """F1 of the second class, or the mean over all classes where there are more than two."""
    counts = confusion(predictions)
    right, mentioned = counts.diagonal(), counts.sum(axis=0) + counts.sum(axis=1)
    values = np.divide(2 * right, mentioned, out=np.zeros(len(counts)), where=mentioned > 0)
    return float(values[1] if len(counts) == 2 else values.mean())


def quadratic_kappa(predictions: Predictions) -> float:
    """Cohen's kappa of ordered classes, a mistake weighted by the square of the distance."""
    counts = confusion(predictions).astype(np.float64)
    places = np.arange(len(counts))
    weights = (places[:, None] - places) ** 2
    by_chance = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    expected = (weights * by_chance).sum()
    return float(1 - (weights * counts).sum() / expected) if expected else float("nan")


def brier(predictions: Predictions) -> float:
    """Mean squared distance of the probabilities from the truth, 0 for a perfect and sure model."""
    truth = np.eye(len(predictions.classes))[predictions.labels]
    return float(((predictions.probabilities - truth) ** 2).sum(axis=1).mean() / 2)


def calibration_error(predictions: Predictions, bins: int = 10) -> float:
    """Expected calibration error: how far what happens is from what was said, over bins of equal width.

    With two classes the probability of the second is compared with how often it is the label, else that of the
    predicted class with how often it is right.
    """
    if len(predictions.classes) == 2:
        said, happened = predictions.probabilities[:, 1], predictions.labels == 1
    else:
        said = predictions.probabilities.max(axis=1)
        happened = predictions.probabilities.argmax(axis=1) == predictions.labels
    place = np.minimum((said * bins).astype(int), bins - 1)
    gaps = np.bincount(place, said - happened, bins)
    return float(np.abs(gaps).sum() / len(said))


def confusion(predictions: Predictions) -> NDArray[np.int64]:
    """(classes, classes) counts of slides: the label gives the row, the predicted class the column."""
    size = len(predictions.classes)
    predicted = predictions.probabilities.argmax(axis=1)
    return np.bincount(predictions.labels * size + predicted, minlength=size * size).reshape(size, size)


def area_under_roc(truth: NDArray[np.bool_], said: NDArray[np.float64]) -> float:
    """The share of pairs of a true and a false row that are in the right order; a tie counts half."""
    positive = int(truth.sum())
    negative = len(truth) - positive
    if not positive or not negative:
        return float("nan")
    below = np.sort(said[~truth])
    pairs = np.searchsorted(below, said[truth], "left").sum() + np.searchsorted(below, said[truth], "right").sum()
    return float(pairs / (2 * positive * negative))


def precision_averaged(truth: NDArray[np.bool_], said: NDArray[np.float64]) -> float:
    """The mean over the true rows of the precision at their threshold."""
    if not truth.any() or truth.all():
        return float("nan")
    order = np.argsort(-said, kind="stable")
    ordered = said[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # ties share a threshold
    found = np.cumsum(truth[order])[last]
    gained = np.diff(found, prepend=0)
    return float((gained * found / (last + 1)).sum() / found[-1])


SCORES: Mapping[str, Score] = {
    "auc": auc,
    "average_precision": average_precision,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "brier": brier,
    "calibration_error": calibration_error,
}
"""Of exclusive classes."""

ORDINAL_SCORES: Mapping[str, Score] = {"quadratic_kappa": quadratic_kappa, **SCORES}
"""Of ordered classes."""

LOWER_IS_BETTER = frozenset({"loss", "brier", "calibration_error", "mean_absolute_error", "root_mean_squared_error"})
"""Of all other scores the higher value is the better one."""


def _mean_over_classes(
    predictions: Predictions, score: Callable[[NDArray[np.bool_], NDArray[np.float64]], float]
) -> float:
    classes = [1] if len(predictions.classes) == 2 else range(len(predictions.classes))
    return float(np.mean([score(predictions.labels == i, predictions.probabilities[:, i]) for i in classes]))
