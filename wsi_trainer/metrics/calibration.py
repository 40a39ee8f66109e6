"""Calibration of probabilities: intercept and slope of a logistic recalibration, and the error without chance's part.

The slope is that of the label's log odds over those of the prediction, 1 where it is right, below where predictions are
too extreme. The intercept is that of the same regression with a slope of 1 ("calibration in the large"): 0 where
predictions are right on average, below where they are too high (Van Calster et al., BMC Medicine 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.classes import ClassPredictions
from wsi_trainer.metrics.intervals import Interval, Z, too_few

Floats = NDArray[np.float64]
IN_DOUBT = 5.0
"""Sum over patients of p (1 - p) from which on the intervals hold 95 %: of patients without doubt nothing is learnt."""
STEPS = 50
FARTHEST = 36.0
"""Log odds beyond which a double is 1; a probability of exactly 0 or 1 is taken for this far."""
NAMES = ("calibration_intercept", "calibration_slope")


def recalibration(predictions: ClassPredictions) -> dict[str, Interval]:
    """Intercept and slope of the second of two classes, with intervals whose errors count patients (a sandwich)."""
    truth, said = predictions.labels == 1, predictions.probabilities[:, 1]
    logit = log_odds(said)
    _, place = np.unique(np.asarray(predictions.patients), return_inverse=True)
    before = _doubt(said, place)
    one = np.ones((len(said), 1))
    fits = {
        "calibration_intercept": (one, logit),
        "calibration_slope": (np.column_stack([one, logit]), np.zeros(len(said))),
    }
    found = {}
    for name, (x, offset) in fits.items():
        value, error, after = logistic(x, truth, offset, predictions.patients)
        found[name] = _interval(predictions, value, error, max(before, after))
    return found


def log_odds(probability: Floats) -> Floats:
    """The logarithm of p / (1 - p)."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log(probability) - np.log1p(-probability), -FARTHEST, FARTHEST)


def logistic(
    x: Floats, truth: NDArray[np.bool_], offset: Floats, patients: Sequence[str]
) -> tuple[float, float, float]:
    """The last coefficient of a logistic regression, its standard error by patient, and the sum of p (1 - p) over
    patients; NaN where there is no maximum.

    Args:
        x: (rows, coefficients).
        truth: (rows,) what is predicted.
        offset: (rows,) log odds that are added.
        patients: Whose the rows are: rows of a patient depend on each other.
    """
    found, nothing = np.zeros(x.shape[1]), (float("nan"),) * 3
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ found + offset, -FARTHEST, FARTHEST)))
        curvature = (x * (p * (1 - p))[:, None]).T @ x
        if np.linalg.cond(curvature) > 1e12:
            return nothing
        step = np.linalg.solve(curvature, x.T @ (truth - p))
        found = found + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-10:
            break
    else:
        return nothing
    owners, place = np.unique(np.asarray(patients), return_inverse=True)
    pulls = np.array([np.bincount(place, column * (truth - p), len(owners)) for column in x.T])
    inverse = np.linalg.inv(curvature)
    spread = inverse @ (pulls @ pulls.T) @ inverse * (len(owners) / max(len(owners) - 1, 1))
    return float(found[-1]), float(np.sqrt(spread[-1, -1])), _doubt(p, place)


def _doubt(p: Floats, place: NDArray[np.int64]) -> float:
    """The sum over patients of the mean p (1 - p) of their rows; ``place`` is the patient of each row."""
    return float((np.bincount(place, p * (1 - p)) / np.bincount(place)).sum())


def _interval(predictions: ClassPredictions, value: float, error: float, doubt: float) -> Interval:
    positive, nan = len(set(np.asarray(predictions.patients)[predictions.labels == 1])), float("nan")
    why = too_few(predictions)
    if np.isnan(value):
        why = "no interval: the classes do not overlap, or there is one"
    elif not why and doubt < IN_DOUBT:
        why = "no interval: too few patients whose class is in doubt"
    low, high = (nan, nan) if why else (value - Z * error, value + Z * error)
    return Interval(value, low, high, 0, len(set(predictions.patients)), positive, why)
