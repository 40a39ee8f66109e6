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
    AreaPredictions,
    ClassPredictions,
    MultiLabelPredictions,
    MultiTargetPredictions,
    Predictions,
    PredictionsError,
    RiskPredictions,
    Score,
    ValuePredictions,
    auc,
    paired_difference,
    score_intervals,
    scores_by_target,
)
from wsi_trainer.metrics.classes import balanced_accuracy
from wsi_trainer.metrics.intervals import Interval, _Sample, too_few


def cohort(generator: np.random.Generator, patients: int, slides: int, shift: float) -> ClassPredictions:
    """Patients with equally scored slides, so that more slides of a patient tell nothing new."""
    labels = np.repeat(np.arange(patients) % 2, slides)
    scores = np.repeat(generator.normal(size=patients), slides) + shift * labels
    p = 1 / (1 + np.exp(-scores))
    names = tuple(f"s{index}" for index in range(patients * slides))
    owners = tuple(f"p{index // slides}" for index in range(patients * slides))
    return ClassPredictions(names, owners, ("0", "1"), labels, np.stack([1 - p, p], axis=1))


def separated(positive: int, negative: int, sure: float = 0.8) -> ClassPredictions:
    """A perfect model."""
    labels = np.repeat([1, 0], [positive, negative])
    p = np.where(labels == 1, sure, 1 - sure) + np.linspace(0, 0.05, len(labels))
    names = tuple(f"s{index}" for index in range(len(labels)))
    return ClassPredictions(names, names, ("0", "1"), labels, np.stack([1 - p, p], axis=1))


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


@pytest.mark.parametrize(("patients", "shift", "truth"), [(12, 1.0, 0.7602), (16, 2.33, 0.9503), (40, 3.0, 0.9831)])
def test_the_interval_of_few_patients_near_the_ceiling_covers_the_truth(
    patients: int, shift: float, truth: float
) -> None:
    """Of 300 studies, 95 % intervals miss 15; here at most 24."""
    missed = 0
    for seed in range(300):
        interval = score_intervals(cohort(np.random.default_rng(seed), patients, 1, shift), {"auc": auc}, count=1)[
            "auc"
        ]
        missed += not interval.low <= truth <= interval.high
    assert missed <= 24


def test_pairing_goes_by_name_and_narrows_the_interval() -> None:
    generator = np.random.default_rng(1)
    first = cohort(generator, 60, 1, 1.0)
    p = np.clip(first.probabilities[:, 1] + 0.02 * generator.normal(size=60), 0, 1)
    second = ClassPredictions(first.slides, first.patients, first.classes, first.labels, np.stack([1 - p, p], axis=1))
    shuffled = second.take(generator.permutation(60))
    paired = paired_difference(first, shuffled, auc, count=300)
    assert paired == paired_difference(first, second, auc, count=300)
    alone = score_intervals(first, {"auc": auc}, count=300)["auc"]
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_predictions_of_other_labels_are_not_compared() -> None:
    first = cohort(np.random.default_rng(0), 10, 1, 1.0)
    other = ClassPredictions(first.slides, first.patients, first.classes, 1 - first.labels, first.probabilities)
    with pytest.raises(PredictionsError, match="different labels"):
        paired_difference(first, other, auc)


def others() -> list[tuple[Predictions, Predictions, Score]]:
    """Predictions of each kind but classes, the same slides predicted at random, and a score."""
    random = np.random.default_rng(4)
    names, labels = tuple(f"s{n}" for n in range(30)), random.integers(0, 2, (30, 2)).astype(float)
    drawn = random.random((30, 1, 2)) + 1
    first, second = (
        (
            MultiLabelPredictions(names, names, ("a", "b"), labels, random.random((30, 2))),
            ValuePredictions(names, names, labels[:, 0] + np.arange(30), random.random(30)),
            RiskPredictions(names, names, np.arange(30) + 1.0, np.arange(30) % 3 > 0, random.random(30)),
            AreaPredictions(
                names, names, ("a", "b"), np.concatenate([drawn * random.random((30, 1, 1)), drawn, drawn], axis=1)
            ),
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
    assert all(i.low <= i.value <= i.high for name, i in intervals.items() if name != "calibration_error")
    assert {name: i.resamples for name, i in intervals.items()} == dict.fromkeys(SCORES, 200) | {
        "auc": 0,
        "calibration_error": 0,
    }


@pytest.mark.parametrize(("positive", "negative"), [(5, 5), (25, 25), (3, 40)])
def test_the_interval_of_a_perfect_model_is_as_wide_as_its_patients_are_few(positive: int, negative: int) -> None:
    """With n patients that are all right, up to about 3 of n could be wrong (the rule of three)."""
    perfect = separated(positive, negative)
    found = score_intervals(perfect, SCORES, count=100)
    for name in ("auc", "average_precision", "balanced_accuracy", "f1"):
        interval = found[name]
        assert interval.value == interval.high == 1
        assert interval.low < 1 - 0.5 / min(positive, negative)
        assert (interval.patients, interval.events) == (positive + negative, positive)
    twice = perfect.take(np.repeat(np.arange(len(perfect)), 3))  # more slides of the same patients tell nothing new
    assert score_intervals(twice, {"auc": auc}, count=100)["auc"].low == pytest.approx(found["auc"].low)


def test_below_ten_patients_there_is_no_interval() -> None:
    two = separated(1, 1)
    interval = score_intervals(two, {"auc": auc}, count=100)["auc"]
    assert (interval.value, str(interval)) == (1, "1.000 (no interval: 2 patients, of 10 needed)")
    wrong = replace(two, probabilities=two.probabilities[:, ::-1])
    difference = paired_difference(wrong, two, auc, count=100)
    assert difference.value == -1 and np.isnan([difference.low, difference.high]).all()
    assert not difference.excludes(0) and "2 patients" in difference.bounds


def test_the_difference_of_two_perfect_models_is_not_known_exactly() -> None:
    first, second = separated(8, 8), separated(8, 8, 0.9)
    difference = paired_difference(first, second, auc, count=100)
    assert difference.value == 0 and difference.low < -0.05 and difference.high > 0.05
    reversed_ = replace(second, probabilities=second.probabilities[:, ::-1])
    worst = paired_difference(reversed_, first, auc, count=100)
    assert worst.value == -1 and worst.low <= -1 and -0.95 < worst.high < 0


def test_a_score_that_resamples_do_not_define_has_no_interval() -> None:
    rare = replace(others()[2][0], events=np.arange(30) == 3)
    interval = score_intervals(rare, RISK_SCORES, count=200)["c_index"]
    assert "defined on" in interval.bounds and 100 < interval.resamples < 160 and interval.events == 1


def test_a_class_of_two_patients_has_no_interval() -> None:
    interval = score_intervals(separated(2, 30), {"auc": auc}, count=50)["auc"]
    assert "2 patients of a class" in interval.bounds
    assert "2 patients of a class" in too_few(separated(2, 30)) and not too_few(separated(3, 30))
    assert "1 patient with an event" in too_few(replace(others()[2][0], events=np.arange(30) == 3))


def all_of_one_class(positive: int, negative: int) -> ClassPredictions:
    """Predictions that are never of the second class, in an order that is right about as often as not."""
    found = separated(positive, negative)
    second = np.random.default_rng(3).uniform(0.1, 0.4, len(found))
    return replace(found, probabilities=np.stack([1 - second, second], axis=1))


def test_a_score_that_all_resamples_have_has_no_interval() -> None:
    """A balanced accuracy of 1/2 on every resample, of a model that calls all slides the same, is no certainty."""
    same = all_of_one_class(11, 11)
    found = score_intervals(same, SCORES, count=100)
    assert str(found["balanced_accuracy"]) == "0.500 (no interval: resamples of the patients all have this value)"
    assert found["f1"].value == 0 == found["f1"].low and found["f1"].high > 0.1
    assert "-0.000" not in " ".join(map(str, found.values()))
    difference = paired_difference(separated(11, 11), same, balanced_accuracy, count=100)
    assert difference.value == 0.5 and difference.absent and not difference.excludes(0)


def test_a_calibration_error_has_no_interval() -> None:
    """Labels are drawn with the probabilities that are predicted: the error is 0, and larger in resamples."""
    generator = np.random.default_rng(0)
    drawn = cohort(generator, 200, 1, 0.0)
    calibrated = replace(drawn, labels=(generator.random(200) < drawn.probabilities[:, 1]).astype(np.int64))
    found = score_intervals(calibrated, SCORES, count=100)
    assert found["calibration_error"].value < 0.02 and np.isnan(found["calibration_error"].low)
    assert found["calibration_error"].bounds == "no interval: resamples alone make this error larger"
    assert not found["brier"].absent
    other = replace(calibrated, probabilities=calibrated.probabilities[::-1])
    difference = paired_difference(calibrated, other, SCORES["calibration_error"], count=100)
    assert difference.absent and not difference.excludes(0)
    labels = MultiLabelPredictions(
        calibrated.slides, calibrated.patients, ("a",), calibrated.labels[:, None].astype(float),
        calibrated.probabilities[:, 1:],
    )  # fmt: skip
    targets = scores_by_target({"grade": SCORES, "markers": MULTI_LABEL_SCORES})
    both = MultiTargetPredictions(calibrated.slides, calibrated.patients, {"grade": calibrated, "markers": labels})
    absent = {name for name, one in score_intervals(both, targets, count=100).items() if one.absent}
    assert absent == {"calibration_error", "markers_calibration_error"}


def test_a_score_of_which_resamples_lie_on_one_side_has_no_interval() -> None:
    drawn = np.random.default_rng(0).normal(0.06, 0.03, 1000)
    interval = _Sample(40, None, 40).interval(0.01, drawn, np.full(40, 0.01))
    assert interval.bounds == "no interval: nearly all resamples lie on one side of it"


def test_a_number_that_is_rounded_to_zero_has_no_sign() -> None:
    assert str(Interval(-1e-5, -2.8e-17, 0.39, 100)) == "0.000 (0.000 to 0.390)"
    assert str(Interval(-0.2, -0.3, -0.1, 100)) == "-0.200 (-0.300 to -0.100)"
