"""Precision over recall, calibration, and what folds say together."""

import numpy as np
import pytest

from wsi_trainer.metrics import SCORES, ClassPredictions, PredictionsError, auc, cross_validation
from wsi_trainer.metrics.curves import calibration, pr_band


def cohort(seed: int, first: int = 0, rows: int = 200) -> ClassPredictions:
    generator = np.random.default_rng(seed)
    p = generator.random(rows)
    labels = (generator.random(rows) < p).astype(np.int64)  # what is said is what happens
    names = tuple(f"s{first + i}" for i in range(rows))
    return ClassPredictions(names, names, ("no", "yes"), labels, np.stack([1 - p, p], axis=1))


def test_the_precision_curve_has_the_average_precision_as_its_area() -> None:
    predictions = cohort(0, rows=400)
    band = pr_band(predictions, count=100)
    area = np.trapezoid(band.y, band.x)
    assert area == pytest.approx(SCORES["average_precision"](predictions), abs=0.02)
    assert band.y[-1] == pytest.approx(predictions.labels.mean(), abs=0.05)
    inside = (band.low <= band.y + 1e-9) & (band.y <= band.high + 1e-9)
    assert inside.mean() > 0.9
    with pytest.raises(ValueError, match="no precision-recall curve"):
        pr_band(predictions.take(np.flatnonzero(predictions.labels == 1)))


def test_a_calibrated_model_lies_in_the_intervals_of_its_bins() -> None:
    bins = calibration(cohort(1, rows=2000))
    assert bins.slides.sum() == 2000 and len(bins.said) == 10
    assert ((bins.low <= bins.said) & (bins.said <= bins.high)).mean() >= 0.8
    assert ((bins.low <= bins.happened) & (bins.happened <= bins.high)).all()


def test_folds_are_averaged_and_pooled() -> None:
    folds = [cohort(2, 0, 60), cohort(3, 60, 80), cohort(4, 140, 70)]
    summary = cross_validation(folds, {"auc": auc}, resamples=50)
    values = [auc(fold) for fold in folds]
    assert [fold["slide"]["auc"] for fold in summary["folds"]] == values
    assert summary["mean"]["auc"] == pytest.approx(np.mean(values))
    assert summary["sd"]["auc"] == pytest.approx(np.std(values, ddof=1))
    labels = np.concatenate([fold.labels for fold in folds])
    together = np.concatenate([fold.probabilities for fold in folds])
    names = tuple(map(str, range(210)))
    assert summary["pooled"]["auc"]["value"] == auc(ClassPredictions(names, names, ("no", "yes"), labels, together))


def test_a_slide_is_held_out_once() -> None:
    with pytest.raises(PredictionsError, match="slide s30 is held out in the folds 0 and 1"):
        cross_validation([cohort(2, 0, 40), cohort(3, 30, 40)], {"auc": auc})
    with pytest.raises(PredictionsError, match="at least 2"):
        cross_validation([cohort(2)], {"auc": auc})
