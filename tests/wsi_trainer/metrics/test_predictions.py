"""ClassPredictions: files, patients, errors."""

from pathlib import Path

import numpy as np
import pytest

from wsi_trainer.metrics import ClassPredictions, PredictionsError


def predictions(probabilities: list[list[float]], labels: list[int], patients: list[str]) -> ClassPredictions:
    classes = tuple("abc"[: len(probabilities[0])])
    slides = tuple(f"s{index}" for index in range(len(labels)))
    return ClassPredictions(slides, tuple(patients), classes, np.array(labels), np.array(probabilities))


def test_a_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    values = np.random.default_rng(0).dirichlet([1, 1, 1], 20)
    first = predictions(values.tolist(), [i % 3 for i in range(20)], [f"p,{i // 2}" for i in range(20)])
    first.write(tmp_path / "deep" / "test.csv")
    second = ClassPredictions.read(tmp_path / "deep" / "test.csv")
    assert (second.slides, second.patients, second.classes) == (first.slides, first.patients, first.classes)
    np.testing.assert_array_equal(second.labels, first.labels)
    np.testing.assert_array_equal(second.probabilities, first.probabilities)


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
