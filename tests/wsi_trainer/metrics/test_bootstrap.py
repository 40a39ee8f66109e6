"""Intervals cover the truth as often as they say, and count patients, not slides."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from wsi_trainer.metrics import (
    AREA_SCORES,
    MULTI_LABEL_SCORES,
    RISK_SCORES,
    SCORES,
    VALUE_SCORES,
    AnyPredictions,
    AreaPredictions,
    Interval,
    MultiLabelPredictions,
    Predictions,
    PredictionsError,
    RiskPredictions,
    Score,
    ValuePredictions,
    auc,
    paired_difference,
    score_intervals,
)
from wsi_trainer.metrics.bootstrap import resamples


def cohort(generator: np.random.Generator, patients: int, slides: int, shift: float) -> Predictions:
    """Patients with equally scored slides, so that more slides of a patient tell nothing new."""
    labels = np.repeat(np.arange(patients) % 2, slides)
    scores = np.repeat(generator.normal(size=patients), slides) + shift * labels
    p = 1 / (1 + np.exp(-scores))
    names = tuple(f"s{index}" for index in range(patients * slides))
    owners = tuple(f"p{index // slides}" for index in range(patients * slides))
    return Predictions(names, owners, ("0", "1"), labels, np.stack([1 - p, p], axis=1))


def test_resamples_draw_whole_patients() -> None:
    patients = ["a", "b", "a", "c", "b", "a"]
    for rows in resamples(patients, 50, seed=0):
        drawn = [patients[row] for row in rows]
        assert drawn.count("a") % 3 == 0 and drawn.count("b") % 2 == 0
        assert drawn.count("a") // 3 + drawn.count("b") // 2 + drawn.count("c") == 3


def test_copies_of_slides_do_not_narrow_the_interval() -> None:
    single = cohort(np.random.default_rng(0), 40, 1, 1.0)
    copied = cohort(np.random.default_rng(0), 40, 5, 1.0)
    widths = []
    for predictions in (single, copied):
        interval = score_intervals(predictions, {"auc": auc}, count=400)["auc"]
        widths.append(interval.high - interval.low)
    assert widths[1] == pytest.approx(widths[0], rel=0.02)


def test_the_interval_covers_the_truth_about_as_often_as_it_says(count: Callable[..., int]) -> None:
    """AUC of two unit normals 1 apart is Φ(1/√2) = 0.7602, which 95 % intervals miss in 5 % of studies."""
    studies = count(ci=40, full=1000)
    covered = 0
    for seed in range(studies):
        predictions = cohort(np.random.default_rng(seed), 80, 1, 1.0)
        interval = score_intervals(predictions, {"auc": auc}, count=150, seed=seed)["auc"]
        covered += interval.low <= 0.7602 <= interval.high
    assert covered / studies >= 0.85


def test_a_model_does_not_differ_from_itself() -> None:
    predictions = cohort(np.random.default_rng(0), 30, 2, 1.0)
    difference = paired_difference(predictions, predictions, auc, count=100)
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)
    assert not difference.excludes(0)


def test_pairing_goes_by_name_and_narrows_the_interval() -> None:
    generator = np.random.default_rng(1)
    first = cohort(generator, 60, 1, 1.0)
    p = np.clip(first.probabilities[:, 1] + 0.02 * generator.normal(size=60), 0, 1)
    second = Predictions(first.slides, first.patients, first.classes, first.labels, np.stack([1 - p, p], axis=1))
    shuffled = second.take(generator.permutation(60))
    paired = paired_difference(first, shuffled, auc, count=300)
    assert paired == paired_difference(first, second, auc, count=300)
    alone = score_intervals(first, {"auc": auc}, count=300)["auc"]
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_predictions_of_other_labels_are_not_compared() -> None:
    first = cohort(np.random.default_rng(0), 10, 1, 1.0)
    other = Predictions(first.slides, first.patients, first.classes, 1 - first.labels, first.probabilities)
    with pytest.raises(PredictionsError, match="different labels"):
        paired_difference(first, other, auc)


def others() -> list[tuple[AnyPredictions, AnyPredictions, Score]]:
    """Predictions of each kind but classes, the same slides predicted at random, and a score."""
    random = np.random.default_rng(4)
    names, labels = tuple(f"s{n}" for n in range(30)), random.integers(0, 2, (30, 2)).astype(float)
    drawn = random.random((30, 1, 2)) + 1
    first, second = (
        (
            MultiLabelPredictions(names, names, ("a", "b"), labels, random.random((30, 2))),
            ValuePredictions(names, names, labels[:, 0] + np.arange(30), random.random(30)),
            RiskPredictions(names, names, np.arange(30) + 1.0, np.arange(30) % 3 > 0, random.random(30)),
            AreaPredictions(names, names, ("a", "b"), np.concatenate([drawn * random.random(), drawn, drawn], axis=1)),
        )
        for _ in range(2)
    )
    tables = (MULTI_LABEL_SCORES, VALUE_SCORES, RISK_SCORES, AREA_SCORES)
    return [(*pair, next(iter(scores.values()))) for *pair, scores in zip(first, second, tables, strict=True)]


@pytest.mark.parametrize("kind", range(4))
def test_every_kind_of_predictions_is_compared_by_slide(kind: int) -> None:
    first, second, score = others()[kind]
    found = paired_difference(first, second.take(np.random.default_rng(0).permutation(30)), score, count=50)
    assert found.value == pytest.approx(score(first) - score(second)) and found.low <= found.high
    with pytest.raises(PredictionsError, match="different labels"):
        paired_difference(first, replace(second, slides=second.slides[::-1]), score)


def test_all_scores_get_an_interval_that_holds_their_value() -> None:
    intervals = score_intervals(cohort(np.random.default_rng(2), 60, 1, 1.5), SCORES, count=200)
    assert set(intervals) == set(SCORES)
    assert all(i.low <= i.value <= i.high and i.resamples == 200 for i in intervals.values())


def test_undefined_resamples_are_counted() -> None:
    predictions = cohort(np.random.default_rng(0), 2, 1, 1.0)
    interval = score_intervals(predictions, {"auc": auc}, count=100)["auc"]
    assert 20 < interval.resamples < 80
    alone = predictions.take(np.array([0]))
    assert score_intervals(alone, {"auc": auc}, count=5)["auc"].resamples == 0


def test_an_interval_knows_what_it_excludes() -> None:
    assert Interval(0.3, 0.1, 0.5, 1).excludes(0) and Interval(-0.3, -0.5, -0.1, 1).excludes(0)
    assert not Interval(0.3, -0.1, 0.5, 1).excludes(0)
