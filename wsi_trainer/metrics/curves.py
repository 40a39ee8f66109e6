"""ROC curves with a band."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_curve

from wsi_trainer.metrics.bootstrap import resamples
from wsi_trainer.metrics.predictions import Predictions


@dataclass(frozen=True)
class RocBand:
    """True positive rate at each false positive rate, with the bounds that hold 95 % of the resampled
    curves.
    """

    false_positive_rate: NDArray[np.float64]
    true_positive_rate: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def roc_band(predictions: Predictions, positive: int = 1, count: int = 500, seed: int = 0) -> RocBand:
    """The ROC curve of one class against the rest, its band from resampled patients."""
    grid = np.linspace(0, 1, 101)
    drawn = []
    for rows in resamples(predictions.patients, count, seed):
        truth = predictions.labels[rows] == positive
        if truth.any() and not truth.all():
            drawn.append(_curve(truth, predictions.probabilities[rows, positive], grid))
    if not drawn:
        raise ValueError(f"no resample holds both {predictions.classes[positive]!r} and another class: no ROC curve")
    curve = _curve(predictions.labels == positive, predictions.probabilities[:, positive], grid)
    low, high = np.quantile(np.stack(drawn), [0.025, 0.975], axis=0)
    return RocBand(grid, curve, low, high)


def _curve(truth: NDArray[np.bool_], score: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    false_positive, true_positive, _ = roc_curve(truth, score)
    return np.interp(grid, false_positive, true_positive)
