"""Worth of a classifier where it decides: shares at its operating point, and net benefit over all thresholds.

Net benefit is that of Vickers and Elkin (Medical Decision Making 2006): the share of true positives less that of false
ones, weighted by the odds of the threshold, as a physician who acts from this probability on weighs the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.metrics.calibration import recalibration
from wsi_trainer.metrics.classes import ClassPredictions, auc
from wsi_trainer.metrics.delong import auc_covariance
from wsi_trainer.metrics.intervals import LEAST, Interval, Z, paired_rows, wilson
from wsi_trainer.metrics.table import Predictions

Floats = NDArray[np.float64]
DELONG_LEAST = 20
"""Patients of each class from which on DeLong's interval holds 95 %."""
DELONG_MOST = 0.97
"""AUC from which on it does not, since the error is no more normal."""
SEVERAL = "no interval: patients have several slides, which depend on each other; see by patient"
POINT = ("sensitivity", "specificity", "positive_predictive_value", "negative_predictive_value")


def binary_targets(predictions: Predictions) -> dict[str, ClassPredictions]:
    """Predictions of two classes by name: of a target of two, and of each label."""
    targets = predictions.by_target
    found = {
        name if not label else label if len(targets) == 1 else f"{name} {label}": part
        for name, predicted in targets.items()
        for label, part in predicted.binary().items()
    }
    return {name: part for name, part in found.items() if len(part)}


def counts_of(predictions: ClassPredictions) -> dict[str, int]:
    """Rows by what is true and what is decided."""
    true, said = predictions.labels == 1, predictions.decided == 1
    return {
        "true_positive": int((true & said).sum()),
        "false_negative": int((true & ~said).sum()),
        "false_positive": int((~true & said).sum()),
        "true_negative": int((~true & ~said).sum()),
    }


def operating_point(predictions: ClassPredictions) -> dict[str, Interval]:
    """Prevalence, sensitivity, specificity and predictive values where it decides, with Wilson's intervals.

    Wilson's interval counts independent rows: there is none where patients have several slides.
    """
    n = counts_of(predictions)
    positive, negative = n["true_positive"] + n["false_negative"], n["true_negative"] + n["false_positive"]
    said, denied = n["true_positive"] + n["false_positive"], n["true_negative"] + n["false_negative"]
    shares = {
        "prevalence": (positive, positive + negative),
        "sensitivity": (n["true_positive"], positive),
        "specificity": (n["true_negative"], negative),
        "positive_predictive_value": (n["true_positive"], said),
        "negative_predictive_value": (n["true_negative"], denied),
    }
    single = len(set(predictions.patients)) == len(predictions)
    return {name: _share(count, of, single) for name, (count, of) in shares.items()}


def _share(count: int, of: int, single: bool) -> Interval:
    nan = float("nan")
    value = count / of if of else nan
    if not single:
        return Interval(value, nan, nan, 0, of, count, SEVERAL)
    if of < LEAST:
        return Interval(value, nan, nan, 0, of, count, f"no interval: {of} patients, of {LEAST} needed")
    return Interval(value, *wilson(count, of), 0, of, count)


def delong(predictions: ClassPredictions) -> Interval:
    """The AUC with DeLong's interval of its log odds, whose units are patients."""
    truth, said = predictions.labels == 1, predictions.probabilities[:, 1]
    value = auc(predictions)
    positive, why = _patients_of(predictions, truth), _delong_absent(predictions, value)
    low, high = float("nan"), float("nan")
    if not why:
        _, covariance = auc_covariance(truth, [said], predictions.patients)
        middle = np.log(value / (1 - value))
        half = Z * np.sqrt(covariance[0, 0]) / (value * (1 - value))
        low, high = (float(1 / (1 + np.exp(-end))) for end in (middle - half, middle + half))
    return Interval(value, low, high, 0, len(set(predictions.patients)), positive, why)


def delong_difference(first: ClassPredictions, second: ClassPredictions) -> tuple[Interval, float]:
    """The difference of the AUCs of two models on the same slides, by DeLong, and the p value of none.

    Raises:
        PredictionsError: The slides or the labels differ.
    """
    second = paired_rows(first, second)
    truth = first.labels == 1
    nan, patients, positive = float("nan"), len(set(first.patients)), _patients_of(first, truth)
    areas = auc(first), auc(second)
    value = areas[0] - areas[1]
    if why := _delong_absent(first, *areas):
        return Interval(value, nan, nan, 0, patients, positive, why), nan
    _, covariance = auc_covariance(truth, [p.probabilities[:, 1] for p in (first, second)], first.patients)
    error = float(np.sqrt(max(np.array([1, -1]) @ covariance @ np.array([1, -1]), 0.0)))
    if error < 1e-9:
        return Interval(value, nan, nan, 0, patients, positive, "no interval: both order all pairs alike"), nan
    from scipy.stats import norm  # slow to import

    p = float(2 * norm.sf(abs(value) / error))
    return Interval(value, value - Z * error, value + Z * error, 0, patients, positive), p


def _patients_of(predictions: ClassPredictions, rows: NDArray[np.bool_]) -> int:
    return len(set(np.asarray(predictions.patients)[rows]))


def _delong_absent(predictions: ClassPredictions, *areas: float) -> str:
    fewest = min(_patients_of(predictions, predictions.labels == index) for index in (0, 1))
    if fewest < DELONG_LEAST:
        return f"no interval: {fewest} patients of a class, of {DELONG_LEAST} needed"
    return f"no interval: DeLong's is not right from an AUC of {DELONG_MOST} on" if max(areas) >= DELONG_MOST else ""


def net_benefit(truth: NDArray[np.bool_], said: Floats, thresholds: Floats) -> Floats:
    """The net benefit of acting on all rows with at least this probability, for each threshold.

    Args:
        truth: (rows,) whether the row is positive.
        said: (rows,) its predicted probability.
        thresholds: Probabilities below 1.
    """
    if (thresholds >= 1).any():
        raise UserError("a threshold of a decision curve is a probability below 1")
    right, wrong = (
        len(rows) - np.searchsorted(np.sort(rows), thresholds, "left") for rows in (said[truth], said[~truth])
    )
    return np.asarray((right - wrong * thresholds / (1 - thresholds)) / len(said))


def benefit_of_all(prevalence: float, thresholds: Floats) -> Floats:
    """The net benefit of acting on everybody."""
    return prevalence - (1 - prevalence) * thresholds / (1 - thresholds)


def at_the_point(predictions: Predictions) -> dict[str, Any]:
    """By target of two classes, or label, all that is said of where it decides, as JSON.

    Returns:
        By name `positive` (the class), `threshold` (None for what is more probable, or where folds differ), and by
        `slide` and `patient`: `counts`, the shares of `operating_point`, `auc_delong`; and, of slides with errors that
        count patients, `calibration_intercept` and `calibration_slope`.
    """
    found = {}
    for name, slides in binary_targets(predictions).items():
        cuts = set() if slides.thresholds is None else set(slides.thresholds.tolist())
        found[name] = {
            "positive": slides.classes[1],
            "threshold": cuts.pop() if len(cuts) == 1 else None,
            "slide": _level(slides) | _dicts(recalibration(slides)),
            "patient": _level(slides.by_patient()),
        }
    return found


def _level(predictions: ClassPredictions) -> dict[str, Any]:
    shares = operating_point(predictions)
    return {"counts": counts_of(predictions)} | _dicts(shares | {"auc_delong": delong(predictions)})


def _dicts(intervals: Mapping[str, Interval]) -> dict[str, dict[str, Any]]:
    return {name: one.to_dict() for name, one in intervals.items()}
