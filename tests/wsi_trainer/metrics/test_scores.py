"""Scores against what they mean, counted by hand."""

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_trainer.metrics import ORDINAL_SCORES, SCORES, ClassPredictions, auc
from wsi_trainer.metrics.curves import roc_band


def binary(scores: list[float], labels: list[int]) -> ClassPredictions:
    names = tuple(f"s{index}" for index in range(len(labels)))
    probabilities = np.stack([1 - np.array(scores), np.array(scores)], axis=1)
    return ClassPredictions(names, names, ("no", "yes"), np.array(labels), probabilities)


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 60)
    scores = np.round(generator.random(60), 1)  # with ties, which count half
    positive, negative = scores[labels == 1], scores[labels == 0]
    pairs = np.mean([(p > n) + 0.5 * (p == n) for p in positive for n in negative])
    assert auc(binary(scores.tolist(), labels.tolist())) == pytest.approx(pairs)


def test_thresholded_scores_by_hand() -> None:
    predictions = binary([0.9, 0.8, 0.3, 0.2, 0.1, 0.6], [1, 1, 1, 0, 0, 0])
    assert SCORES["balanced_accuracy"](predictions) == pytest.approx(2 / 3)
    assert SCORES["f1"](predictions) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert SCORES["brier"](predictions) == pytest.approx(np.mean([0.01, 0.04, 0.49, 0.04, 0.01, 0.36]))
    assert SCORES["average_precision"](predictions) == pytest.approx((1 + 1 + 3 / 4) / 3)


def test_auc_of_one_class_is_not_a_number() -> None:
    assert np.isnan(auc(binary([0.1, 0.2], [1, 1])))


def test_several_classes_are_averaged_one_against_rest() -> None:
    labels = np.array([0, 1, 2, 0, 1, 2])
    names = tuple("abcdef")
    perfect = ClassPredictions(names, names, ("x", "y", "z"), labels, np.eye(3)[labels])
    assert auc(perfect) == 1 and SCORES["f1"](perfect) == 1 and SCORES["brier"](perfect) == 0
    swapped = ClassPredictions(names, names, ("x", "y", "z"), labels, np.eye(3)[(labels + 1) % 3])
    assert auc(swapped) == pytest.approx(0.25) and SCORES["balanced_accuracy"](swapped) == 0


def test_the_roc_curve_has_the_area_and_its_band_holds_it() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 300)
    predictions = binary(np.clip(0.4 + 0.2 * labels + 0.2 * generator.normal(size=300), 0, 1).tolist(), labels.tolist())
    band = roc_band(predictions, count=200)
    area = np.trapezoid(band.y, band.x)
    assert area == pytest.approx(auc(predictions), abs=0.01)
    inside = (band.low <= band.y + 1e-9) & (band.y <= band.high + 1e-9)
    assert inside.mean() > 0.95
    with pytest.raises(ValueError, match="no ROC curve"):
        roc_band(binary([0.1, 0.2], [1, 1]))


@pytest.mark.parametrize("classes", [2, 4])
def test_every_score_is_that_of_scikit_learn(classes: int) -> None:
    generator = np.random.default_rng(classes)
    labels = generator.integers(0, classes, 90)
    p = np.round(generator.dirichlet(np.ones(classes), 90) + 0.3 * np.eye(classes)[labels], 2)  # with ties
    p /= p.sum(axis=1, keepdims=True)
    names = tuple(map(str, range(90)))
    predictions = ClassPredictions(names, names, tuple("abcd"[:classes]), labels, p)
    truth, guess = np.eye(classes)[labels], p.argmax(axis=1)
    columns = slice(1, 2) if classes == 2 else slice(None)
    expected = {
        "auc": sk.roc_auc_score(truth[:, columns], p[:, columns], average="macro"),
        "average_precision": sk.average_precision_score(truth[:, columns], p[:, columns], average="macro"),
        "balanced_accuracy": sk.balanced_accuracy_score(labels, guess),
        "f1": sk.f1_score(labels, guess, average="binary" if classes == 2 else "macro"),
        "quadratic_kappa": sk.cohen_kappa_score(labels, guess, weights="quadratic"),
    }
    for name, value in expected.items():
        assert ORDINAL_SCORES[name](predictions) == pytest.approx(value, abs=1e-12), name


def test_kappa_without_variation_is_not_a_number_and_a_far_mistake_costs_more() -> None:
    names = ("a", "b", "c", "d")
    labels = np.array([0, 1, 2, 3])

    def kappa(guess: list[int]) -> float:
        return ORDINAL_SCORES["quadratic_kappa"](ClassPredictions(names, names, names, labels, np.eye(4)[guess]))

    assert kappa([0, 1, 2, 3]) == 1 and kappa([0, 1, 2, 0]) < kappa([0, 1, 2, 2]) < 1
    one = ClassPredictions(names, names, names, np.zeros(4, dtype=np.int64), np.eye(4)[[0, 0, 0, 0]])
    assert np.isnan(ORDINAL_SCORES["quadratic_kappa"](one))


def test_calibration_error_by_hand() -> None:
    sure = binary([0.05, 0.05, 0.95, 0.95], [0, 0, 1, 1])
    assert SCORES["calibration_error"](sure) == pytest.approx(0.05)
    wrong = binary([0.95, 0.95, 0.05, 0.05], [0, 0, 1, 1])
    assert SCORES["calibration_error"](wrong) == pytest.approx(0.95)
    assert SCORES["calibration_error"](binary([1.0, 0.0], [1, 0])) == 0
