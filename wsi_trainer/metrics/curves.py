"""Curves for pictures: ROC and precision over recall with a band, and calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.metrics import precision_recall_curve, roc_curve

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


@dataclass(frozen=True)
class PrBand:
    """Precision at each recall, with the bounds that hold 95 % of the resampled curves."""

    recall: NDArray[np.float64]
    precision: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    prevalence: float
    """The share of the class among the slides: the precision of a model without any aim."""


@dataclass(frozen=True)
class Calibration:
    """What was said and what happened, in bins of equal width; bins without a slide are left out."""

    said: NDArray[np.float64]
    """Mean predicted probability of the slides of the bin."""
    happened: NDArray[np.float64]
    """The share of them that has the class."""
    slides: NDArray[np.int64]
    low: NDArray[np.float64]
    """Lower bound of the 95 % Wilson interval of `happened`."""
    high: NDArray[np.float64]


def roc_band(predictions: Predictions, positive: int = 1, count: int = 500, seed: int = 0) -> RocBand:
    """The ROC curve of one class against the rest, its band from resampled patients."""
    grid = np.linspace(0, 1, 101)
    curve, low, high = _band(predictions, positive, _roc, grid, count, seed, "ROC")
    return RocBand(grid, curve, low, high)


def pr_band(predictions: Predictions, positive: int = 1, count: int = 500, seed: int = 0) -> PrBand:
    """The precision-recall curve of one class against the rest, its band from resampled patients."""
    grid = np.linspace(0, 1, 101)
    curve, low, high = _band(predictions, positive, _precision, grid, count, seed, "precision-recall")
    return PrBand(grid, curve, low, high, float((predictions.labels == positive).mean()))


def calibration(predictions: Predictions, positive: int = 1, bins: int = 10) -> Calibration:
    """How often one class is the label where its probability lies in each of `bins` bins of equal width."""
    said = predictions.probabilities[:, positive]
    truth = predictions.labels == positive
    place = np.minimum((said * bins).astype(int), bins - 1)
    slides = np.bincount(place, minlength=bins)
    used = slides > 0
    n = slides[used]
    share = np.bincount(place, truth, bins)[used] / n
    low, high = _wilson(share, n)
    return Calibration(np.bincount(place, said, bins)[used] / n, share, n, low, high)


Curve = Callable[[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def _band(
    predictions: Predictions, positive: int, curve: Curve, grid: NDArray[np.float64], count: int, seed: int, name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    truths, said = predictions.labels == positive, predictions.probabilities[:, positive]
    drawn = []
    # What is resampled was checked when it was read; a check for each resample would be most of the time.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        for rows in resamples(predictions.patients, count, seed):
            if truths[rows].any() and not truths[rows].all():
                drawn.append(curve(truths[rows], said[rows], grid))
    if not drawn:
        raise ValueError(f"no resample holds both {predictions.classes[positive]!r} and another class: no {name} curve")
    low, high = np.quantile(np.stack(drawn), [0.025, 0.975], axis=0)
    return curve(truths, said, grid), low, high


def _roc(truth: NDArray[np.bool_], said: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    false_positive, true_positive, _ = roc_curve(truth, said)
    return np.interp(grid, false_positive, true_positive)


def _precision(truth: NDArray[np.bool_], said: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """The precision at the first threshold that reaches each recall; between thresholds nothing is interpolated."""
    precision, recall, _ = precision_recall_curve(truth, said)
    precision, recall = precision[::-1], recall[::-1]
    return precision[np.minimum(np.searchsorted(recall, grid - 1e-12), len(recall) - 1)]


def _wilson(share: NDArray[np.float64], n: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    z = 1.959964
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return centre - reach, centre + reach
