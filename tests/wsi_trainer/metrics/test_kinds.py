"""Predictions of several labels, of a number and of a risk: scores by hand, files bit for bit, patients."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from wsi_trainer.metrics import (
    MULTI_LABEL_SCORES,
    RISK_SCORES,
    VALUE_SCORES,
    ClassPredictions,
    MultiLabelPredictions,
    Predictions,
    PredictionsError,
    RiskPredictions,
    ValuePredictions,
    auc,
    read_predictions,
    summarise,
)
from wsi_trainer.metrics.values import c_index, kaplan_meier, kaplan_meier_band, log_rank

ROWS = 40
SLIDES = tuple(f"s{i}" for i in range(ROWS))
PATIENTS = tuple(f"p{i // 2}" for i in range(ROWS))
SITES = tuple("north" if i < 24 else "south" for i in range(ROWS))


def some(kind: str) -> Predictions:
    generator = np.random.default_rng(7)
    if kind == "classes":
        labels = np.repeat(generator.integers(0, 3, ROWS // 2), 2)
        return ClassPredictions(SLIDES, PATIENTS, ("a", "b", "c"), labels, generator.dirichlet(np.ones(3), ROWS), SITES)
    if kind == "labels":
        labels = generator.integers(0, 2, (ROWS, 2)).astype(float)
        labels[3, 1] = np.nan
        return MultiLabelPredictions(SLIDES, PATIENTS, ("x", "y"), labels, generator.random((ROWS, 2)), SITES)
    if kind == "value":
        targets = generator.normal(size=ROWS)
        return ValuePredictions(SLIDES, PATIENTS, targets, targets + generator.normal(size=ROWS), SITES)
    times = np.repeat(generator.integers(1, 9, ROWS // 2).astype(float), 2)
    events = np.repeat(generator.random(ROWS // 2) < 0.6, 2)
    return RiskPredictions(SLIDES, PATIENTS, times, events, np.round(generator.random(ROWS), 1), SITES)


@pytest.mark.parametrize("kind", ["classes", "labels", "value", "risk"])
def test_a_file_tells_its_kind_and_reads_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    first = some(kind)
    first.write(tmp_path / "test.csv")
    second = read_predictions(tmp_path / "test.csv")
    assert type(second) is type(first)
    for name in first.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(second, name), getattr(first, name), err_msg=name)


def test_several_labels_are_scored_one_by_one_where_they_are_known() -> None:
    predictions = some("labels")
    assert isinstance(predictions, MultiLabelPredictions)
    known = ~np.isnan(predictions.labels[:, 1])
    alone = [
        sk.roc_auc_score(predictions.labels[:, 0], predictions.probabilities[:, 0]),
        sk.roc_auc_score(predictions.labels[known, 1], predictions.probabilities[known, 1]),
    ]
    assert MULTI_LABEL_SCORES["auc"](predictions) == pytest.approx(np.mean(alone))
    assert auc(predictions.of("y")) == pytest.approx(alone[1]) and len(predictions.of("y")) == ROWS - 1
    patients = predictions.by_patient()
    assert len(patients) == ROWS // 2
    assert patients.labels[1, 1] == predictions.labels[2, 1]  # the other slide's label is not known
    np.testing.assert_array_equal(patients.probabilities[0], predictions.probabilities[:2].max(axis=0))


def test_scores_of_a_number_are_those_of_scipy_and_scikit_learn() -> None:
    predictions = some("value")
    assert isinstance(predictions, ValuePredictions)
    targets, values = predictions.targets, predictions.values
    expected = {
        "r2": sk.r2_score(targets, values),
        "pearson": stats.pearsonr(targets, values).statistic,
        "spearman": stats.spearmanr(targets, values).statistic,
        "mean_absolute_error": sk.mean_absolute_error(targets, values),
        "root_mean_squared_error": sk.root_mean_squared_error(targets, values),
    }
    assert {name: score(predictions) for name, score in VALUE_SCORES.items()} == pytest.approx(expected)
    assert predictions.by_patient().values[0] == pytest.approx(values[:2].mean())


def test_the_c_index_counts_the_pairs_that_can_be_compared() -> None:
    predictions = some("risk")
    assert isinstance(predictions, RiskPredictions)
    times, events, risks = predictions.times, predictions.events, predictions.risks
    right = pairs = 0.0
    for i in range(ROWS):
        for j in range(ROWS):
            if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
                pairs += 1
                right += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    assert c_index(predictions) == pytest.approx(right / pairs)
    nobody = RiskPredictions(SLIDES, PATIENTS, times, np.zeros(ROWS, dtype=bool), risks)
    assert np.isnan(c_index(nobody))


def test_slides_of_a_patient_share_one_survival() -> None:
    predictions = some("risk")
    assert isinstance(predictions, RiskPredictions)
    assert predictions.by_patient().risks[0] == predictions.risks[:2].max()
    times = predictions.times.copy()
    times[1] += 1
    with pytest.raises(PredictionsError, match="patient p0 have different times"):
        RiskPredictions(SLIDES, PATIENTS, times, predictions.events, predictions.risks).by_patient()


def test_survival_of_groups_against_its_definition() -> None:
    """Kaplan-Meier and log-rank of patients with ties and losses to follow-up, written out event by event."""
    drawn = np.random.default_rng(3)
    for count in (6, 25, 80):
        times, events = np.ceil(drawn.exponential(6, count)), drawn.random(count) < 0.7
        group = drawn.random(count) < 0.4
        share, expected_share, greenwood, bounds = 1.0, [1.0], 0.0, [(np.nan, np.nan)]
        observed = expected = variance = 0.0
        for time in sorted(set(times[events].tolist())):
            at_risk = sum(t >= time for t in times)
            died = sum(t == time and e for t, e in zip(times, events))
            share *= 1 - died / at_risk
            expected_share.append(share)
            greenwood += died / (at_risk * (at_risk - died)) if at_risk > died else np.inf
            width = 1.959964 * math.sqrt(greenwood) / math.log(share) if share > 0 else np.nan
            bounds.append((share ** math.exp(-width), share ** math.exp(width)))
            ours = sum(t >= time and g for t, g in zip(times, group))
            observed += sum(t == time and e and g for t, e, g in zip(times, events, group))
            expected += died * ours / at_risk
            if at_risk > 1:
                variance += died * ours * (at_risk - ours) * (at_risk - died) / (at_risk**2 * (at_risk - 1))
        np.testing.assert_allclose(kaplan_meier(times, events)[1], expected_share, rtol=1e-12)
        np.testing.assert_allclose(np.transpose(kaplan_meier_band(times, events)), bounds, rtol=1e-6)
        p = math.erfc(abs(observed - expected) / math.sqrt(2 * variance))
        assert log_rank(times, events, group) == pytest.approx(p, rel=1e-9)
    nobody = np.zeros(6, dtype=bool)
    assert np.isnan(log_rank(np.arange(1.0, 7), nobody, np.arange(6) < 3))
    assert kaplan_meier(np.arange(1.0, 7), nobody)[1].tolist() == [1.0]
    assert np.isnan(log_rank(np.arange(1.0, 7), ~nobody, nobody))


@pytest.mark.parametrize("kind", ["classes", "labels", "value", "risk"])
def test_a_summary_has_slides_patients_classes_and_sites(kind: str) -> None:
    scores = {"classes": {"auc": auc}, "labels": MULTI_LABEL_SCORES, "value": VALUE_SCORES, "risk": RISK_SCORES}[kind]
    predictions = some(kind)
    summary = summarise(predictions, scores, resamples=30)
    assert (summary["slides"], summary["patients"]) == (ROWS, ROWS // 2)
    assert set(summary["slide"]) == set(summary["patient"]) == set(scores)
    assert {site: part["slides"] for site, part in summary["per_site"].items()} == {"north": 24, "south": 16}
    assert list(summary.get("per_class", {})) == list(getattr(predictions, "classes", ()))
    for name, score in scores.items():
        assert summary["slide"][name]["value"] == score(predictions)


def test_the_classes_of_a_summary_are_scored_against_the_rest() -> None:
    predictions = some("classes")
    assert isinstance(predictions, ClassPredictions)
    summary = summarise(predictions, {"auc": auc}, resamples=10)["per_class"]
    guess = predictions.probabilities.argmax(axis=1)
    for index, name in enumerate(predictions.classes):
        truth = predictions.labels == index
        assert summary[name]["auc"]["value"] == pytest.approx(
            sk.roc_auc_score(truth, predictions.probabilities[:, index])
        )
        assert summary[name]["recall"]["value"] == pytest.approx(sk.recall_score(truth, guess == index))
        assert summary[name]["precision"]["value"] == pytest.approx(sk.precision_score(truth, guess == index))


def test_rows_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PredictionsError, match="2 sites"):
        ValuePredictions(("a",), ("p",), np.zeros(1), np.zeros(1), ("x", "y"))
    with pytest.raises(PredictionsError, match="events of shape"):
        RiskPredictions(("a",), ("p",), np.zeros(1), np.zeros(2, dtype=bool), np.zeros(1))
    (tmp_path / "text.csv").write_text("slide,patient,target,value\na,p,1,high\n")
    with pytest.raises(PredictionsError, match="line 2: value is 'high'"):
        read_predictions(tmp_path / "text.csv")
    (tmp_path / "none.csv").write_text("slide,patient\na,p\n")
    with pytest.raises(PredictionsError, match="none of the columns"):
        read_predictions(tmp_path / "none.csv")
