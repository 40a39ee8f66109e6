"""Statistics of a classifier for reviewers: shares at its operating point, DeLong, calibration, net benefit."""

import numpy as np
import pytest
from scipy.stats import norm

from wsi_trainer.metrics import ClassPredictions, PredictionsError, delong_difference, score_intervals
from wsi_trainer.metrics.calibration import recalibration
from wsi_trainer.metrics.classes import auc
from wsi_trainer.metrics.decision import Decision
from wsi_trainer.metrics.delong import auc_covariance
from wsi_trainer.metrics.intervals import wilson
from wsi_trainer.metrics.operating import at_the_point, net_benefit, operating_point

OVARIAN = """
3.0 5.8 10 0 3.2 6.3 5 1 3.9 6.8 3 1 2.8 4.8 6 0 3.2 5.8 3 1 0.9 4.0 5 0 2.5 5.7 8 0 1.6 5.6 5 1 3.8 5.7 5 1 3.7 6.7 6 1
3.2 5.4 4 1 3.8 6.6 6 1 4.1 6.6 5 1 3.6 5.7 5 1 4.3 7.0 4 1 3.6 6.7 4 0 2.3 4.4 6 1 4.2 7.6 4 0 4.0 6.6 6 0 3.5 5.8 6 1
3.8 6.8 7 1 3.0 4.7 8 0 4.5 7.4 5 1 3.7 7.4 5 1 3.1 6.6 6 1 4.1 8.2 6 1 4.3 7.0 5 1 4.3 6.5 4 1 3.2 5.1 5 1 2.6 4.7 6 1
3.3 6.8 6 0 1.7 4.0 7 0 3.7 6.1 5 1 3.3 6.3 7 1 4.2 7.7 6 1 3.5 6.2 5 1 2.9 5.7 9 0 2.1 4.8 7 1 2.8 6.2 8 0 4.0 7.0 7 1
3.3 5.7 6 1 3.7 6.9 5 1 3.6 6.6 5 1
"""
"""Albumin, total protein, K-G score, outcome of surgery: DeLong, DeLong and Clarke-Pearson (Biometrics 1988), the 43
patients without missing values.
"""


def predictions(labels: np.ndarray, p: np.ndarray, slides: int = 1) -> ClassPredictions:
    names = tuple(f"s{row}" for row in range(len(labels)))
    owners = tuple(f"p{row // slides}" for row in range(len(labels)))
    return ClassPredictions(names, owners, ("no", "yes"), labels.astype(np.int64), np.stack([1 - p, p], axis=1))


def binormal(generator: np.random.Generator, patients: int, area: float, slides: int = 1) -> ClassPredictions:
    """Half of the patients positive; calibrated probabilities with this AUC, the slides of a patient alike."""
    apart = norm.ppf(area) * 2**0.5
    labels = np.arange(patients) % 2
    logit = apart * (generator.normal(size=patients) + apart * (labels - 0.5))
    p = 1 / (1 + np.exp(-logit))
    return predictions(np.repeat(labels, slides), np.repeat(p, slides), slides)


def test_delong_is_that_of_sas_on_the_data_of_its_paper() -> None:
    """SAS/STAT, PROC LOGISTIC, "Comparing Receiver Operating Characteristic Curves"."""
    albumin, protein, score, outcome = np.array(OVARIAN.split(), float).reshape(-1, 4).T
    owners = [str(row) for row in range(43)]
    areas, covariance = auc_covariance(outcome == 1, [albumin, protein, 10 - score], owners)
    assert areas.round(4).tolist() == [0.7366, 0.6478, 0.7258]
    assert np.sqrt(covariance.diagonal()).round(4).tolist() == [0.0927, 0.1000, 0.1028]
    apart = np.array([0, 1, -1])
    error = np.sqrt(apart @ covariance @ apart)
    assert (areas @ apart).round(4) == -0.0780 and error.round(4) == 0.1046
    assert ((areas @ apart / error) ** 2).round(4) == 0.5554


def test_copies_of_slides_change_no_variance_and_independent_slides_are_worth_more() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 2 == 1
    said = generator.normal(size=60) + labels
    once = auc_covariance(labels, [said], [str(n) for n in range(60)])[1][0, 0]
    owners = [str(n // 4) for n in range(240)]
    copied = auc_covariance(np.repeat(labels, 4), [np.repeat(said, 4)], owners)[1][0, 0]
    assert copied == pytest.approx(once, rel=1e-9)
    drawn = generator.normal(size=240) + np.repeat(labels, 4)
    wide, narrow = (
        score_intervals(predictions(np.repeat(labels, 4), 1 / (1 + np.exp(-x)), 4), {"auc": auc})["auc"]
        for x in (np.repeat(said, 4), drawn)
    )
    assert narrow.high - narrow.low < 0.7 * (wide.high - wide.low)


def test_the_difference_of_two_models_by_delong() -> None:
    first = binormal(np.random.default_rng(1), 100, 0.9)
    noise = np.random.default_rng(2).normal(size=100)
    p = 1 / (1 + np.exp(-np.log(first.probabilities[:, 1] / first.probabilities[:, 0]) - 2 * noise))
    second = predictions(first.labels, p)
    found, chance = delong_difference(first, second.take(np.arange(100)[::-1]))
    assert found.value == pytest.approx(auc(first) - auc(second)) and found.low > 0 and chance < 0.05
    again, sure = delong_difference(first, first)
    assert again.absent and np.isnan(sure)
    with pytest.raises(PredictionsError, match="different labels"):
        delong_difference(first, predictions(1 - first.labels, p))


def test_shares_at_the_operating_point_are_counted_by_hand() -> None:
    labels = np.repeat([1, 1, 0, 0], [30, 10, 45, 15])
    p = np.repeat([0.9, 0.2, 0.1, 0.4], [30, 10, 45, 15])
    even = predictions(labels, p)
    found = operating_point(even)
    assert {name: one.value for name, one in found.items()} == {
        "prevalence": 0.4, "sensitivity": 0.75, "specificity": 1.0, "positive_predictive_value": 1.0,
        "negative_predictive_value": 60 / 70,
    }  # fmt: skip
    assert (found["sensitivity"].low, found["sensitivity"].high) == wilson(30, 40)
    assert found["sensitivity"].patients == 40
    lower = at_the_point(even.decided_by(Decision((0.3,), "sensitivity:0.7")))["label"]
    assert lower["threshold"] == 0.3 and lower["patient"]["counts"] == {
        "true_positive": 30, "false_negative": 10, "false_positive": 15, "true_negative": 45,
    }  # fmt: skip
    assert at_the_point(even)["label"]["threshold"] is None


def test_shares_of_slides_that_depend_on_each_other_have_no_interval() -> None:
    slides = binormal(np.random.default_rng(0), 60, 0.9, slides=4)
    assert "see by patient" in operating_point(slides)["sensitivity"].absent
    assert not operating_point(slides.by_patient())["sensitivity"].absent
    few = operating_point(binormal(np.random.default_rng(0), 18, 0.9))
    assert few["sensitivity"].absent == "no interval: 9 patients, of 10 needed"


def test_net_benefit_by_hand() -> None:
    truth, said = np.array([True, True, False, False, False]), np.array([0.9, 0.3, 0.6, 0.2, 0.1])
    found = net_benefit(truth, said, np.array([0.2, 0.5]))
    assert found.tolist() == pytest.approx([2 / 5 - 2 / 5 * 0.25, 1 / 5 - 1 / 5])


def test_calibration_and_net_benefit_are_those_of_statsmodels_and_dcurves() -> None:
    sm, dcurves = pytest.importorskip("statsmodels.api"), pytest.importorskip("dcurves")
    pandas = pytest.importorskip("pandas")
    drawn = binormal(np.random.default_rng(3), 120, 0.8)
    p = drawn.probabilities[:, 1] ** 2
    tested, logit = predictions(drawn.labels, p), np.log(p / (1 - p))
    family = sm.families.Binomial()
    slope = sm.GLM(tested.labels, sm.add_constant(logit), family).fit().params[1]
    intercept = sm.GLM(tested.labels, np.ones(120), family, offset=logit).fit().params[0]
    found = recalibration(tested)
    assert found["calibration_slope"].value == pytest.approx(slope, rel=1e-8)
    assert found["calibration_intercept"].value == pytest.approx(intercept, rel=1e-8)
    table = dcurves.dca(pandas.DataFrame({"y": tested.labels, "p": p}), "y", ["p"], thresholds=[0.1, 0.35])
    theirs = table[table.model == "p"].net_benefit.to_numpy()
    assert net_benefit(tested.labels == 1, p, np.array([0.1, 0.35])) == pytest.approx(theirs, abs=1e-12)


def test_calibration_of_known_regressions() -> None:
    """The regression on two groups is exact: log odds of their shares against those that were said."""
    labels = np.concatenate([np.repeat([1, 0], [10, 30]), np.repeat([1, 0], [24, 16])])
    said = predictions(labels, np.repeat([0.1, 0.9], 40))
    found = recalibration(said)
    truth = [np.log(share / (1 - share)) for share in (0.25, 0.6)]
    assert found["calibration_slope"].value == pytest.approx((truth[1] - truth[0]) / (2 * np.log(9)))
    assert found["calibration_slope"].high < 1 and not found["calibration_slope"].absent
    expected = 40 / (1 + np.exp(np.log(9) * np.array([1, -1]) - found["calibration_intercept"].value))
    assert expected.sum() == pytest.approx(34)  # as many as there were
    perfect = predictions(np.repeat([0, 1], 20), np.repeat([0.2, 0.8], 20))
    assert "do not overlap" in recalibration(perfect)["calibration_slope"].absent
    sure = binormal(np.random.default_rng(0), 40, 0.999)
    assert "in doubt" in recalibration(sure)["calibration_intercept"].absent
