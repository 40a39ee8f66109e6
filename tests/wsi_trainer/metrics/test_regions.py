"""Scores of regions against judges that try every threshold, and their files."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_trainer.metrics import (
    BORDER_SCORES,
    FROC_SCORES,
    MISSED,
    BorderPredictions,
    LesionPredictions,
    Marks,
    PredictionsError,
    read_predictions,
    score_intervals,
    summarise,
)
from wsi_trainer.metrics.curves import froc_band

# Few values, so that thresholds are shared.
probabilities = st.sampled_from([0.25, 0.5, 0.625, 0.75, 1.0])
marks = st.builds(
    lambda lesions, false: Marks(np.array(lesions, float), np.array(false, float)),
    st.lists(probabilities | st.just(MISSED), max_size=4),
    st.lists(probabilities, max_size=9),
)
rows = st.lists(st.tuples(marks, marks), min_size=1, max_size=7)


def predictions(found: list[tuple[Marks, Marks]]) -> LesionPredictions:
    slides = tuple(f"s{number}" for number in range(len(found)))
    patients = tuple(f"p{number // 2}" for number in range(len(found)))
    return LesionPredictions.of_slides(slides, patients, ("a", "b"), found)


def judged(found: list[tuple[Marks, Marks]], place: int, rate: float) -> float:
    """The best of all thresholds that make no more false positives than may be."""
    lesions = [value for row in found for value in row[place].lesions.tolist()]
    false = [value for row in found for value in row[place].false.tolist()]
    if not lesions:
        return np.nan
    best = 0.0
    for threshold in (0.0, 0.25, 0.5, 0.625, 0.75, 1.0, 2.0):
        if sum(value >= threshold for value in false) / len(found) <= rate:
            best = max(best, sum(value >= threshold for value in lesions) / len(lesions))
    return best


@given(rows)
def test_sensitivity_is_that_of_the_best_threshold(found: list[tuple[Marks, Marks]]) -> None:
    said = predictions(found)
    for name, rate in (("1/4", 0.25), ("1/2", 0.5), ("1", 1), ("2", 2), ("4", 4), ("8", 8)):
        both = [judged(found, place, rate) for place in (0, 1)]
        expected = np.nanmean(both) if not np.isnan(both).all() else np.nan
        for rows in (said, said.by_patient()):  # patients bring their slides: rates stay those of slides
            np.testing.assert_allclose(FROC_SCORES[name](rows), expected)
        np.testing.assert_allclose(FROC_SCORES[name](said.of("b")), both[1])
    each = [[judged(found, place, rate) for rate in (0.25, 0.5, 1, 2, 4, 8)] for place in (0, 1)]
    known = [np.mean(row) for row in each if not np.isnan(row).any()]
    np.testing.assert_allclose(FROC_SCORES["froc"](said), np.mean(known) if known else np.nan)


@settings(max_examples=20)
@given(rows)
def test_marks_come_back_from_their_file(found: list[tuple[Marks, Marks]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "lesions.csv"
        predictions(found).write(path)
        again = LesionPredictions.read(path)
    assert again.classes == ("a", "b") and again.patients == predictions(found).patients
    for row, expected in zip(again.marks, found, strict=True):
        for one, other in zip(row, expected, strict=True):
            assert one.lesions.tolist() == other.lesions.tolist() and one.false.tolist() == other.false.tolist()


def test_a_file_of_marks_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lesions.csv"
    path.write_text("slide,patient,lesions_a,false_a\ns,p,0.5 x,\n")
    with pytest.raises(PredictionsError, match=r"lesions\.csv, line 2: .*'x'"):
        LesionPredictions.read(path)
    path.write_text("slide,patient,lesions_a\ns,p,0.5\n")
    with pytest.raises(PredictionsError, match=r"lacks the columns.*false_a"):
        LesionPredictions.read(path)


def test_the_band_of_the_curve_holds_it_and_ends_at_all_that_is_detected() -> None:
    random = np.random.default_rng(0)
    found = [(Marks(random.random(3) + 0.2, random.random(6)), Marks(np.array([MISSED]), np.array([0.5])))] * 8
    found += [(Marks(random.random(2), random.random(3)), Marks(np.empty(0), np.empty(0)))] * 16
    said = predictions(found)
    band = froc_band(said, count=100)
    assert band is not None and (band.low <= band.high).all() and band.y[-1] == 1
    assert (np.diff(band.y) >= 0).all()
    for name, rate in (("1/4", 0.25), ("8", 8.0)):
        at = np.flatnonzero(np.isclose(band.x, rate))
        assert band.y[at] == FROC_SCORES[name](said.of("a"))
    never = froc_band(said.of("b"), count=20)
    assert never is not None and not never.y.any()
    assert froc_band(predictions([(Marks(np.empty(0), np.ones(1)),) * 2])) is None
    summed = summarise(said, FROC_SCORES, resamples=20)
    assert set(summed["per_class"]) == {"a", "b"} and summed["patients"] == 12
    several = replace(said, patients=said.slides)
    interval = score_intervals(several, FROC_SCORES, 50)["froc"]
    assert interval.low < interval.value < interval.high


def borders(*slides: list[list[float]]) -> BorderPredictions:
    names = tuple(f"s{number}" for number in range(len(slides)))
    return BorderPredictions(names, ("p",) * len(slides), ("none", "a", "b"), np.array(slides, float))


def test_borders_of_each_class_and_of_all() -> None:
    said = borders(
        [[9, 8, 0], [9, 10, 0], [9, 15, 0], [9, 20, 0]],
        [[0, 0, 0], [0, 0, 4], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
    )
    of_a = 2 * 0.8 * 0.75 / (0.8 + 0.75)
    assert BORDER_SCORES["border_f1"](said) == pytest.approx(of_a / 2)  # that of b, which is nowhere, is 0
    assert BORDER_SCORES["slide_border_f1"](said) == pytest.approx(of_a / 2)  # the third slide has no border
    each = summarise(said, BORDER_SCORES, resamples=5)["per_class"]
    assert each["a"]["border_precision"]["value"] == 0.8 and each["a"]["border_recall"]["value"] == 0.75
    assert each["b"]["border_f1"]["value"] == 0 and np.isnan(each["b"]["border_recall"]["value"])
    assert "1 patient, of 10 needed" in score_intervals(said, BORDER_SCORES, 5)["border_f1"].bounds


def test_borders_come_back_from_their_file(tmp_path: Path) -> None:
    said = borders([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])
    said.write(tmp_path / "borders.csv")
    again = BorderPredictions.read(tmp_path / "borders.csv")
    assert np.array_equal(again.pixels, said.pixels) and again.classes == said.classes
    with pytest.raises(PredictionsError):
        read_predictions(tmp_path / "lesions.csv")
