"""Lesions that are detected against false positives for each slide: FROC, as CAMELYON16 counts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wsi_trainer.metrics.bootstrap import resamples
from wsi_trainer.metrics.class_pixels import mean
from wsi_trainer.metrics.lesions import MISSED, LesionPredictions
from wsi_trainer.metrics.scores import Score

RATES: Mapping[str, float] = {"1/4": 1 / 4, "1/2": 1 / 2, "1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0}
"""False positives for each slide at which sensitivity is said."""
FIRST, LAST = 1 / 8, 16.0
"""Ends of the curve."""
_WHOLE = 1e-9


@dataclass(frozen=True)
class FrocBand:
    """Sensitivity at each rate of false positives, with the bounds that hold 95 % of the resampled curves."""

    false_positives: NDArray[np.float64]
    """For each slide."""
    sensitivity: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def sensitivity(predictions: LesionPredictions, place: int, rates: ArrayLike) -> NDArray[np.float64]:
    """The share of a class's lesions that is detected where there may be so many false positives for each slide.

    The threshold is the lowest that makes no more of them: between thresholds nothing is interpolated. NaN where there
    is no lesion.
    """
    marks = predictions.all_of(place)
    allowed = np.floor(np.asarray(rates, np.float64) * predictions.images.sum() + _WHOLE).astype(np.int64)
    if not len(marks.lesions):
        return np.full(allowed.shape, np.nan)
    # What is false has to stay below the threshold from here on: the first that is too many, if there is one.
    beyond = np.append(np.sort(marks.false)[::-1], MISSED)
    lowest = beyond[np.minimum(allowed, len(marks.false))]
    return (marks.lesions > lowest[..., None]).mean(axis=-1)


def found_at(predictions: LesionPredictions, rate: float) -> float:
    """The mean over classes of the sensitivity at a rate."""
    return mean(np.array([sensitivity(predictions, place, rate) for place in range(len(predictions.classes))]))


def froc(predictions: LesionPredictions) -> float:
    """The mean over classes of the mean sensitivity at `RATES`: the score of CAMELYON16."""
    rates = list(RATES.values())
    return mean(np.array([sensitivity(predictions, place, rates).mean() for place in range(len(predictions.classes))]))


def froc_band(predictions: LesionPredictions, count: int = 500, seed: int = 0) -> FrocBand | None:
    """The curve of the first class, its band from resampled patients; None where no lesion is drawn."""
    grid = np.geomspace(FIRST, LAST, 113)  # sixteen steps for each doubling
    curve = sensitivity(predictions, 0, grid)
    if np.isnan(curve).any():
        return None
    drawn = (sensitivity(predictions.take(rows), 0, grid) for rows in resamples(predictions.patients, count, seed))
    known = [one for one in drawn if not np.isnan(one).any()]
    low, high = np.quantile(np.stack(known or [curve]), [0.025, 0.975], axis=0)
    return FrocBand(grid, curve, low, high)


FROC_SCORES: Mapping[str, Score] = {
    "froc": froc,
    **{name: partial(found_at, rate=rate) for name, rate in RATES.items()},
}
