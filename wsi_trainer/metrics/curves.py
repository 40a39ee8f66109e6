"""Curves for pictures, with bands from resampled patients: ROC, precision over recall, calibration, FROC."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.classes import ClassPredictions, counts_above
from wsi_trainer.metrics.intervals import resamples, too_few, wilson
from wsi_trainer.metrics.lesions import LesionPredictions, sensitivity
from wsi_trainer.metrics.operating import net_benefit

FIRST, LAST = 1 / 8, 16.0
"""False positives for each slide at the ends of a FROC curve."""
Floats = NDArray[np.float64]
Line = Callable[[NDArray[np.bool_], Floats, Floats], Floats]


@dataclass(frozen=True)
class Band:
    """A curve, and the bounds that hold 95 % of the resampled curves."""

    x: Floats
    y: Floats
    low: Floats
    high: Floats
    absent: str = ""
    """Why there are no bounds, as there is no interval of the score; they are NaN then."""


@dataclass(frozen=True)
class Calibration:
    """Probabilities and frequencies in bins of equal width; bins without a slide are left out."""

    said: Floats
    """Mean predicted probability of the slides of the bin."""
    happened: Floats
    """The share of them that has the class."""
    slides: NDArray[np.int64]
    low: Floats
    """Lower bound of the 95 % Wilson interval of `happened`."""
    high: Floats


def roc_band(predictions: ClassPredictions, count: int = 500, seed: int = 0) -> Band:
    """True positive rate over false positive rate of the second of two classes."""
    return _of_class(predictions, _roc, "ROC", count, seed)


def pr_band(predictions: ClassPredictions, count: int = 500, seed: int = 0) -> Band:
    """Precision over recall of the second of two classes."""
    return _of_class(predictions, _precision, "precision-recall", count, seed)


def benefit_band(predictions: ClassPredictions, count: int = 500, seed: int = 0) -> Band:
    """Net benefit over the threshold of the second of two classes."""
    return _of_class(predictions, net_benefit, "decision", count, seed, np.linspace(0.01, 0.99, 99))


def froc_band(predictions: LesionPredictions, count: int = 500, seed: int = 0) -> Band | None:
    """Sensitivity over false positives for each slide, of the first class; None where no lesion is drawn."""
    grid = np.geomspace(FIRST, LAST, 113)  # sixteen steps for each doubling
    curve = sensitivity(predictions, 0, grid)
    if np.isnan(curve).any():
        return None
    parts = (sensitivity(predictions.take(rows), 0, grid) for rows in resamples(predictions.patients, count, seed))
    return _band(grid, curve, (part for part in parts if not np.isnan(part).any()), too_few(predictions))


def calibration(predictions: ClassPredictions, bins: int = 10) -> Calibration:
    """Frequency of the second of two classes in each of `bins` bins of equal width of its probability."""
    said = predictions.probabilities[:, 1]
    place = np.minimum((said * bins).astype(int), bins - 1)
    slides = np.bincount(place, minlength=bins)
    used = slides > 0
    n = slides[used]
    count = np.bincount(place[predictions.labels == 1], minlength=bins)[used]
    low, high = np.array([wilson(int(one), int(of)) for one, of in zip(count, n, strict=True)]).T
    return Calibration(np.bincount(place, said, bins)[used] / n, count / n, n, low, high)


def _of_class(
    predictions: ClassPredictions, line: Line, name: str, count: int, seed: int, grid: Floats | None = None
) -> Band:
    grid = np.linspace(0, 1, 101) if grid is None else grid
    truth, said = predictions.labels == 1, predictions.probabilities[:, 1]
    if not truth.any() or truth.all():
        raise ValueError(f"no slide, or every one, is {predictions.classes[1]!r}: no {name} curve")
    parts = (rows for rows in resamples(predictions.patients, count, seed) if 0 < truth[rows].sum() < len(rows))
    drawn = (line(truth[rows], said[rows], grid) for rows in parts)
    return _band(grid, line(truth, said, grid), drawn, too_few(predictions))


def _band(x: Floats, y: Floats, drawn: Iterable[Floats], absent: str) -> Band:
    if absent:
        nothing = np.full_like(y, np.nan)
        return Band(x, y, nothing, nothing, absent)
    low, high = np.quantile(np.stack(list(drawn) or [y]), [0.025, 0.975], axis=0)
    return Band(x, y, low, high)


def _roc(truth: NDArray[np.bool_], said: Floats, grid: Floats) -> Floats:
    right, wrong = counts_above(truth, said)
    return np.interp(grid, np.append(0, wrong) / wrong[-1], np.append(0, right) / right[-1])


def _precision(truth: NDArray[np.bool_], said: Floats, grid: Floats) -> Floats:
    """The precision at the first threshold that reaches each recall; between thresholds nothing is interpolated."""
    right, wrong = counts_above(truth, said)
    recall, precision = np.append(0, right / right[-1]), np.append(1, right / (right + wrong))
    return np.asarray(precision[np.minimum(np.searchsorted(recall, grid - 1e-12), len(recall) - 1)])
