"""Scores of a set of predictions. Each is a number, or NaN where the predictions do not define it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from sklearn import metrics as sk

from wsi_trainer.metrics.predictions import Predictions

Score = Callable[[Predictions], float]


def auc(predictions: Predictions) -> float:
    """Area under the ROC curve; with several classes the mean over one-against-rest."""
    return _mean_over_classes(predictions, sk.roc_auc_score)


def average_precision(predictions: Predictions) -> float:
    """Average precision; with several classes the mean over one-against-rest."""
    return _mean_over_classes(predictions, sk.average_precision_score)


def balanced_accuracy(predictions: Predictions) -> float:
    """The mean over classes of the share of its slides that are predicted right."""
    predicted = predictions.probabilities.argmax(axis=1)
    present = np.unique(predictions.labels)
    return float(np.mean([(predicted[predictions.labels == label] == label).mean() for label in present]))


def f1(predictions: Predictions) -> float:
    """F1 of the second class, or the mean over all classes where there are more than two."""
    predicted = predictions.probabilities.argmax(axis=1)
    if len(predictions.classes) == 2:
        return float(sk.f1_score(predictions.labels, predicted, zero_division=0.0))
    labels = range(len(predictions.classes))
    return float(sk.f1_score(predictions.labels, predicted, labels=labels, average="macro", zero_division=0.0))


def brier(predictions: Predictions) -> float:
    """Mean squared distance of the probabilities from the truth, 0 for a perfect and sure model."""
    truth = np.eye(len(predictions.classes))[predictions.labels]
    return float(((predictions.probabilities - truth) ** 2).sum(axis=1).mean() / 2)


SCORES: Mapping[str, Score] = {
    "auc": auc,
    "average_precision": average_precision,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "brier": brier,
}


def _mean_over_classes(predictions: Predictions, score: Callable[..., float]) -> float:
    classes = [1] if len(predictions.classes) == 2 else range(len(predictions.classes))
    values = []
    for index in classes:
        truth = predictions.labels == index
        if truth.all() or not truth.any():
            return float("nan")
        values.append(float(score(truth, predictions.probabilities[:, index])))
    return float(np.mean(values))
