"""Decisions: thresholds against a search by hand, scores, files, folds and patients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import (
    SCORES,
    ClassPredictions,
    Decision,
    MultiLabelPredictions,
    PredictionsError,
    auc,
    joined_folds,
    read_predictions,
    summarise,
    write_predictions,
)
from wsi_trainer.metrics.classes import confusion
from wsi_trainer.metrics.decision import EVEN, check_rule, decide, threshold

ROWS = 30


def some(seed: int = 3, name: str = "s") -> ClassPredictions:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, ROWS)
    p = np.round(np.clip(random.normal(0.25 + 0.2 * labels, 0.15), 0, 1), 2)
    slides = tuple(f"{name}{row}" for row in range(ROWS))
    patients = tuple(f"{name}p{row // 2}" for row in range(ROWS))
    return ClassPredictions(slides, patients, ("normal", "tumour"), labels, np.stack([1 - p, p], axis=1))


def test_without_a_threshold_it_is_argmax_and_with_one_from_there_on() -> None:
    p = np.array([[0.6, 0.4], [0.5, 0.5], [0.4, 0.6]])
    assert decide(p, None).tolist() == p.argmax(axis=1).tolist() == [0, 0, 1]
    assert decide(p, np.full(3, 0.4)).tolist() == [1, 1, 1] and decide(p, np.full(3, 0.6)).tolist() == [0, 0, 1]
    assert decide(p, np.full(3, EVEN)).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "rule", ["f1", "balanced_accuracy", "youden", "cost:5", "sensitivity:0.9", "specificity:0.8", "specificity:1"]
)
def test_a_threshold_is_the_best_of_all(rule: str) -> None:
    predictions = some()
    truth, p = predictions.labels == 1, predictions.probabilities[:, 1]
    found = threshold(truth, p, rule)

    scores = {
        "f1": lambda said: sk.f1_score(truth, said, zero_division=0), "sensitivity": lambda said: said[truth].mean(),
        "balanced_accuracy": lambda said: sk.balanced_accuracy_score(truth, said),
        "specificity": lambda said: (~said)[~truth].mean(),
        "youden": lambda said: said[truth].mean() - said[~truth].mean(),
        "cost": lambda said: -5 * (truth & ~said).sum() - (said & ~truth).sum(),
    }  # fmt: skip

    def at(name: str, cut: float) -> float:
        said = p >= cut
        right = confusion(predictions.decided_by(Decision((cut,))))
        assert right[1, 1] == (said & truth).sum()
        return float(scores[name](said))

    every = np.arange(0, 1.015, 0.005)  # probabilities have two digits: thresholds at and between them
    name, _, share = rule.partition(":")
    if name not in ("sensitivity", "specificity"):
        assert at(name, found) == pytest.approx(max(at(name, cut) for cut in every))
        return
    assert at(name, found) >= float(share)
    other = "specificity" if name == "sensitivity" else "sensitivity"
    assert at(other, found) == pytest.approx(max(at(other, cut) for cut in every if at(name, cut) >= float(share)))


def test_slides_of_one_class_tell_no_threshold() -> None:
    assert np.isnan(threshold(np.ones(3, dtype=bool), np.array([0.1, 0.5, 0.9]), "f1"))
    first = some()
    one = first.take(np.flatnonzero(first.labels == 1))
    chosen = one.chosen("f1")
    assert chosen is not None and chosen.thresholds == (EVEN,)
    assert (one.decided_by(chosen).decided == one.decided).all()


def test_scores_with_a_decision_change_where_something_is_decided() -> None:
    first = some()
    second = first.decided_by(Decision((0.35,), "0.35"))
    said = first.probabilities[:, 1] >= 0.35
    assert SCORES["f1"](second) == pytest.approx(sk.f1_score(first.labels, said)) != SCORES["f1"](first)
    assert [second.words(row).predicted for row in range(ROWS)] == [("normal", "tumour")[int(one)] for one in said]
    assert [second.words(row).wrong for row in range(ROWS)] == (said != first.labels).tolist()
    for name in ("auc", "average_precision", "brier", "calibration_error"):
        assert SCORES[name](second) == SCORES[name](first)
    recall = summarise(second, {"auc": auc}, resamples=10)["per_class"]["tumour"]["recall"]["value"]
    assert recall == pytest.approx(sk.recall_score(first.labels, said))
    patients = second.by_patient()
    assert (patients.decided == (patients.probabilities[:, 1] >= 0.35)).all()


def test_labels_have_a_threshold_each() -> None:
    random = np.random.default_rng(1)
    labels, p = random.integers(0, 2, (ROWS, 2)).astype(float), random.random((ROWS, 2))
    first = some()
    predictions = MultiLabelPredictions(first.slides, first.patients, ("x", "y"), labels, p)
    chosen = predictions.chosen("f1")
    assert chosen is not None and len(chosen.thresholds) == 2
    decided = predictions.decided_by(chosen)
    assert (decided.decided == (p >= np.array(chosen.thresholds))).all()
    for place, name in enumerate("xy"):
        best = max(sk.f1_score(labels[:, place], p[:, place] >= cut) for cut in p[:, place])
        assert SCORES["f1"](decided.of(name)) == pytest.approx(best)


def test_a_decision_goes_with_the_file_and_through_folds(tmp_path: Path) -> None:
    first, second = some().decided_by(Decision((0.35,))), some(4, "t").decided_by(Decision((0.2,)))
    write_predictions(tmp_path / "test.csv", first)
    again = read_predictions(tmp_path / "test.csv")
    assert again.declaration() == first.declaration() and again.by_target["label"].words(0) == first.words(0)
    both = joined_folds([first, second])
    assert both.decided.tolist() == [*first.decided, *second.decided]
    with pytest.raises(PredictionsError, match="several thresholds"):
        write_predictions(tmp_path / "both.csv", both)
    write_predictions(tmp_path / "plain.csv", some())
    assert "thresholds" not in (tmp_path / "plain.targets.json").read_text()


@pytest.mark.parametrize("rule", ["", "f2", "1.5", "0", "nan", "sensitivity", "sensitivity:2", "auc:0.9", "f1:0.5"])
def test_a_rule_that_is_none_is_named(rule: str) -> None:
    with pytest.raises(UserError, match=r"train\.decision is .*balanced_accuracy, youden, f1"):
        check_rule(rule)
