"""Scores against what they mean, counted by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_trainer.metrics import (
    ORDINAL_SCORES,
    SCORES,
    ClassPredictions,
    PredictionsError,
    RiskPredictions,
    auc,
    cross_validation,
    joined_folds,
)
from wsi_trainer.metrics.curves import calibration, pr_band, roc_band
from wsi_trainer.metrics.values import c_index
from wsi_trainer.report.figures import _p_of


def binary(scores: list[float], labels: list[int]) -> ClassPredictions:
    names = tuple(f"s{index}" for index in range(len(labels)))
    probabilities = np.stack([1 - np.array(scores), np.array(scores)], axis=1)
    return ClassPredictions(names, names, ("no", "yes"), np.array(labels), probabilities)


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
    assert SCORES["calibration_error"](binary([0.8, 0.8, 0.8, 0.8], [1, 1, 1, 0])) == 0  # as near as four can be
    assert SCORES["calibration_error"](binary([0.3] * 4, [1, 1, 1, 0])) == pytest.approx((0.45**2 - 0.75 / 12) ** 0.5)


def test_the_calibration_error_of_calibrated_models_is_near_0_also_of_few_slides() -> None:
    """Without chance's part taken off, errors of 30 slides were 0.15 on average."""
    errors = [SCORES["calibration_error"](cohort(seed, rows=30)) for seed in range(200)]
    assert np.median(errors) < 0.04 and np.mean(np.square(errors)) < 0.02


# -- precision over recall, calibration, and what folds say together


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


def test_folds_are_scored_by_patient_too() -> None:
    """A patient is in one fold, with all slides."""
    rows = [cohort(2, 0, 60), cohort(3, 60, 80)]
    folds = [replace(fold, patients=tuple(str(int(slide.strip("s")) // 2) for slide in fold.slides)) for fold in rows]
    summary = cross_validation(folds, {"auc": auc}, resamples=50)["patient"]
    values = [auc(fold.by_patient()) for fold in folds]
    assert [fold["auc"] for fold in summary["folds"]] == values and summary["mean"]["auc"] == np.mean(values)
    assert summary["pooled"]["auc"]["value"] == auc(joined_folds(folds).by_patient())
    assert summary["pooled"]["auc"]["patients"] == 70
    contradictory = cross_validation([RISKS.take(np.arange(6)), RISKS.take(np.arange(6, 12))], {"c_index": c_index}, 20)
    assert "patient" not in contradictory and "different times or events" in contradictory["patient_absent"]


RISKS = RiskPredictions(
    tuple(map(str, range(12))), tuple(str(n // 2) for n in range(12)), np.arange(12) + 1.0, np.ones(12, bool),
    np.arange(12) % 5 + 0.5,
)  # fmt: skip


def test_curves_of_few_patients_have_no_bands_and_groups_of_few_no_p() -> None:
    for patients, absent in ((9, "9 patients, of 10 needed"), (10, "")):
        some = binary(list(np.linspace(0.1, 0.9, patients)), [n % 2 for n in range(patients)])
        for band in (roc_band(some, count=50), pr_band(some, count=50)):
            assert absent in band.absent and np.isnan(band.low).all() == np.isnan(band.high).all() == bool(absent)
        risks = RiskPredictions(
            tuple(map(str, range(patients))), tuple(map(str, range(patients))), np.arange(patients) + 1.0,
            np.ones(patients, bool), np.arange(patients)[::-1] + 0.5,
        )  # fmt: skip
        said = _p_of(risks, risks.risks > np.median(risks.risks))
        assert said == (f"no p: {absent}" if absent else said) and said.startswith("no p" if absent else "p = 0.0")
    rare = replace(risks, events=np.arange(10) < 2)
    assert _p_of(rare, rare.risks > 5) == "no p: 2 patients with an event or a lesion, of 3 needed"


def test_a_slide_is_held_out_once() -> None:
    with pytest.raises(PredictionsError, match="slide s30 is held out in the folds 0 and 1"):
        cross_validation([cohort(2, 0, 40), cohort(3, 30, 40)], {"auc": auc})
    with pytest.raises(PredictionsError, match="at least 2"):
        cross_validation([cohort(2)], {"auc": auc})


# -- classPredictions: files, patients, errors


def predictions(probabilities: list[list[float]], labels: list[int], patients: list[str]) -> ClassPredictions:
    classes = tuple("abc"[: len(probabilities[0])])
    slides = tuple(f"s{index}" for index in range(len(labels)))
    return ClassPredictions(slides, tuple(patients), classes, np.array(labels), np.array(probabilities))


def test_a_patient_is_as_positive_as_its_most_positive_slide() -> None:
    by_patient = predictions([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], [0, 1, 0], ["p", "p", "q"]).by_patient()
    assert by_patient.slides == ("p", "q") and by_patient.labels.tolist() == [1, 0]
    np.testing.assert_allclose(by_patient.probabilities, [[0.2, 0.8], [0.6, 0.4]])


def test_several_classes_are_averaged_and_have_to_agree() -> None:
    values = [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]]
    by_patient = predictions(values, [1, 1], ["p", "p"]).by_patient()
    np.testing.assert_allclose(by_patient.probabilities, [[0.3, 0.5, 0.2]])
    with pytest.raises(PredictionsError, match="patient p have different labels"):
        predictions(values, [0, 1], ["p", "p"]).by_patient()


def test_alignment_follows_the_names() -> None:
    both = predictions([[0.9, 0.1], [0.2, 0.8]], [0, 1], ["p", "q"])
    assert both.aligned(["s1", "s0"]).labels.tolist() == [1, 0]
    with pytest.raises(PredictionsError, match="1 slides have no prediction, the first is s9"):
        both.aligned(["s0", "s9"])


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PredictionsError, match="slide s1 is not a finite number"):
        predictions([[0.5, 0.5], [float("nan"), 0.5]], [0, 1], ["p", "q"])
    with pytest.raises(PredictionsError, match="1 patients"):
        predictions([[0.5, 0.5], [0.5, 0.5]], [0, 1], ["p"])
    with pytest.raises(PredictionsError, match="wsi-train test"):
        ClassPredictions.read(tmp_path / "absent.csv")
    (tmp_path / "odd.csv").write_text("slide,patient,label\na,b,c\n")
    with pytest.raises(PredictionsError, match="lacks the columns"):
        ClassPredictions.read(tmp_path / "odd.csv")
    (tmp_path / "label.csv").write_text("slide,patient,label,probability_x,probability_y\na,b,z,0.5,0.5\n")
    with pytest.raises(PredictionsError, match="label 'z'"):
        ClassPredictions.read(tmp_path / "label.csv")
