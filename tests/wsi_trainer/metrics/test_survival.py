"""Survival by risk against published examples and other programs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from wsi_trainer.metrics import PredictionsError, RiskPredictions, read_predictions, write_predictions
from wsi_trainer.metrics.decision import Decision
from wsi_trainer.metrics.survival import (
    Baseline,
    brier_at,
    cox,
    dynamic_auc,
    grid_of,
    hazard_ratio,
    integrated_brier,
    of_survival,
    quarters,
    resampled_interval,
    survivals,
)
from wsi_trainer.metrics.table import join
from wsi_trainer.metrics.values import log_rank

TREATED = "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+"
CONTROL = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"
"""Weeks of remission of leukaemia with 6-mercaptopurine and without (Freireich et al., Blood 1963); + is censored."""


def freireich() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    words = [*TREATED.split(), *CONTROL.split()]
    times = np.array([float(word.rstrip("+")) for word in words])
    return times, np.array(["+" not in word for word in words]), np.repeat([False, True], 21)


def drawn(seed: int, patients: int, slope: float = 0.7) -> RiskPredictions:
    """Exponential times whose log hazard is `slope` for each unit of risk; a third is censored."""
    generator = np.random.default_rng(seed)
    risks = generator.normal(size=patients)
    times = generator.exponential(20 * np.exp(-slope * risks))
    ends = generator.exponential(40, patients)
    names = tuple(f"p{n}" for n in range(patients))
    return RiskPredictions(names, names, np.minimum(times, ends), times <= ends, risks)


def test_the_hazard_ratio_is_that_of_the_published_example() -> None:
    """Cox's regression with Efron's ties as R's survival prints it (coefficient, standard error, ratio and bounds), and
    the log-rank statistic of 16.79.
    """
    times, events, control = freireich()
    value, error = cox(times, events, control.astype(float))
    assert (round(value, 3), round(error, 3)) == (1.572, 0.412)
    names = tuple(map(str, range(42)))
    found = RiskPredictions(names, names, times, events, control.astype(float))
    ratio = hazard_ratio(found, control)
    assert ratio.absent == "no interval: 9 events in a group, of 10 needed" and round(ratio.value, 3) == 4.817
    assert (round(np.exp(value - 1.96 * error), 3), round(np.exp(value + 1.96 * error), 2)) == (2.146, 10.81)
    assert log_rank(times, events, control) == pytest.approx(4.169e-05, rel=1e-3)


def test_measures_of_risk_are_those_of_scikit_survival() -> None:
    """Fixed numbers of scikit-survival 0.28 on the same patients: AUC at three times, integrated Brier score, slope."""
    training, patients = drawn(1, 150), drawn(2, 120)
    baseline = Baseline.of(training)
    at = grid_of(patients)
    survival = baseline.survival(patients.risks, at)
    found = [dynamic_auc(patients, time) for time in quarters(patients)]
    assert found == pytest.approx([0.6601553256145003, 0.6595673877959487, 0.6910418380589518], abs=1e-12)
    assert baseline.slope == pytest.approx(0.7136481063301814, abs=1e-9)
    assert integrated_brier(patients, survival, at) == pytest.approx(0.1829640521707129, abs=1e-9)


def test_they_are_equal_where_scikit_survival_is_installed() -> None:
    metrics = pytest.importorskip("sksurv.metrics")
    linear = pytest.importorskip("sksurv.linear_model")
    training, patients = drawn(1, 150), drawn(2, 120)

    def told(part: RiskPredictions) -> np.ndarray:
        return np.array(list(zip(part.events, part.times)), dtype=[("event", bool), ("time", float)])

    baseline, at = Baseline.of(training), grid_of(patients)
    survival = baseline.survival(patients.risks, at)
    theirs, _ = metrics.cumulative_dynamic_auc(told(patients), told(patients), patients.risks, quarters(patients))
    assert [dynamic_auc(patients, time) for time in quarters(patients)] == pytest.approx(theirs, abs=1e-12)
    _, brier = metrics.brier_score(told(patients), told(patients), survival, at)
    assert brier_at(patients, survival, at) == pytest.approx(brier, abs=1e-12)
    model = linear.CoxPHSurvivalAnalysis(ties="efron").fit(training.risks[:, None], told(training))
    assert baseline.slope == pytest.approx(float(model.coef_[0]), abs=1e-6)
    curves = np.array([curve(at) for curve in model.predict_survival_function(patients.risks[:, None])])
    assert survival == pytest.approx(curves, abs=1e-6)


def test_without_censoring_they_are_plain_shares() -> None:
    names = tuple("abcd")
    every = RiskPredictions(names, names, np.array([1.0, 2, 3, 4]), np.ones(4, bool), np.array([0.9, 0.1, 0.8, 0.2]))
    assert dynamic_auc(every, 2.5) == 0.5 and np.isnan(dynamic_auc(every, 4))
    said = np.array([[0.0], [0.25], [0.5], [1.0]])
    assert brier_at(every, said, np.array([2.5])).tolist() == [(0 + 0.25**2 + 0.5**2 + 0) / 4]


def test_groups_are_cut_where_training_says_and_go_with_the_file(tmp_path: Path) -> None:
    patients = drawn(3, 80)
    assert patients.higher is None and "hazard_ratio" not in of_survival(patients, count=20)
    cut = patients.decided_by(Decision((0.5,), "median of training"))
    write_predictions(tmp_path / "test.csv", cut)
    again = read_predictions(tmp_path / "test.csv")
    assert isinstance(again, RiskPredictions) and again.higher is not None
    assert again.higher.sum() == (patients.risks > 0.5).sum() != 40
    found = survivals(again, {"label": Baseline.of(drawn(4, 100))})["label"]
    assert found["higher"]["patients"] + found["lower"]["patients"] == 80
    assert found["integrated_brier"]["value"] < found["integrated_brier_without_risk"]
    other = patients.decided_by(Decision((0.0,)))
    folds = join([cut.take(np.arange(40)), other.take(np.arange(40, 80))])
    assert folds.higher is not None and folds.higher.tolist() == [
        risk > (0.5 if row < 40 else 0.0) for row, risk in enumerate(patients.risks)
    ]
    write_predictions(tmp_path / "folds.csv", folds)
    pooled = read_predictions(tmp_path / "folds.csv")
    assert isinstance(pooled, RiskPredictions) and pooled.cuts is None, "a file has one cut"


def test_patients_that_contradict_themselves_have_no_survival() -> None:
    one = drawn(0, 20)
    twice = RiskPredictions(one.slides, ("a",) * 20, one.times, one.events, one.risks)
    with pytest.raises(PredictionsError):
        twice.by_patient()
    assert survivals(twice, {}) == {}


def test_the_mean_of_baselines_is_of_risks_on_one_scale() -> None:
    first, second = Baseline.of(drawn(1, 100)), Baseline.of(drawn(2, 100))
    mean = Baseline.mean([first, second])
    at = np.array([5.0, 20.0])
    hazards = [-np.log(one.survival(np.array([one.median]), at)) for one in (first, second)]
    assert -np.log(mean.survival(np.zeros(1), at)) == pytest.approx(np.mean(hazards, axis=0))
    assert Baseline.read(mean.record()) == mean


@pytest.mark.slow
def test_intervals_of_survival_cover_the_truth(count: Callable[..., int]) -> None:
    """The hazard ratio of two groups, and the AUC until a time, whose truth 200,000 uncensored patients have."""
    studies = count(ci=20, full=400)
    slope, at = 0.7, 15.0
    generator = np.random.default_rng(0)
    risks = generator.normal(size=200_000)
    names = tuple(map(str, range(len(risks))))
    times = generator.exponential(20 * np.exp(-slope * risks))
    truth = dynamic_auc(RiskPredictions(names, names, times, np.ones(len(risks), bool), risks), at)
    held = {"ratio": 0, "auc": 0}
    for seed in range(studies):
        patients = drawn(seed, 100)
        group = np.random.default_rng(seed).random(100) < 0.5
        times = np.random.default_rng([seed, 1]).exponential(np.where(group, 10, 20))
        two = RiskPredictions(patients.slides, patients.patients, times, times < 40, group.astype(float))
        ratio = hazard_ratio(two, group)
        held["ratio"] += ratio.low <= 2 <= ratio.high
        found = resampled_interval(patients, partial(dynamic_auc, time=at), 200)
        held["auc"] += found.low <= truth <= found.high
    worst = 0.93 - 3 * (0.95 * 0.05 / studies) ** 0.5
    assert min(held.values()) / studies >= worst, held
