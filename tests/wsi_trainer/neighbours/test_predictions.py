"""Predictions of STAMP are read as they are, and compared with a run's on the same patients.

The columns are those that `_to_prediction_df`, `_to_regression_prediction_df` and `_to_survival_prediction_df` of STAMP
(c54ce06) write.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.wsi_trainer.fit.feature_cohort import words, write_features
from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import (
    ClassPredictions,
    MultiTargetPredictions,
    RiskPredictions,
    ValuePredictions,
    paired_difference,
    read_predictions,
)
from wsi_trainer.neighbours import read_stamp


def written(folder: Path, text: str, name: str = "patient-preds.csv") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_each_layout_is_read(tmp_path: Path) -> None:
    head = "PATIENT,MSI,pred,MSI_MSS,MSI_MSI_H,loss\n"
    found = read_stamp(written(tmp_path, head + "p2,MSI_H,MSI_H,0.25,0.75,0.4\np1,MSS,MSS,0.5,0.5,0.7\np3,,MSS,1,0,\n"))
    assert isinstance(found, ClassPredictions)
    assert found.patients == found.slides == ("p2", "p1", "p3") and found.classes == ("MSS", "MSI_H")
    assert found.labels.tolist() == [1, 0, -1] and found.probabilities[0].tolist() == [0.25, 0.75]
    value = read_stamp(written(tmp_path, "PATIENT,age,pred,loss\np1,61.5,60,1.5\np2,,50,\n"))
    assert isinstance(value, ValuePredictions) and value.values.tolist() == [60, 50]
    np.testing.assert_array_equal(value.targets, [61.5, np.nan])
    risk = read_stamp(written(tmp_path, "PATIENT,pred_score,days,dead,cut_off=0.3\np1,0.5,100,1,\np2,0.1,50.0,0,\n"))
    assert isinstance(risk, RiskPredictions) and risk.events.tolist() == [True, False]
    assert risk.times.tolist() == [100, 50] and risk.higher is not None and risk.higher.tolist() == [True, False]
    head = "PATIENT,a,a_b,pred_a,a_0,a_1,pred_a_b,a_b_x,a_b_y,a_b_z,loss\n"
    both = read_stamp(written(tmp_path, head + "p1,1,y,1,0.2,0.8,y,0.1,0.7,0.2,0.9\np2,0,,0,0.9,0.1,x,0.6,0.2,0.2,1\n"))
    assert isinstance(both, MultiTargetPredictions) and list(both.by_target) == ["a", "a_b"]
    assert both.parts["a_b"].classes == ("x", "y", "z") and len(both.by_target["a_b"]) == 1
    for text, said in (("a,b\n1,2\n", "is no patient-preds.csv"), ("P,l,pred,l_a,loss\n1,b,a,1,0\n", "none of a")):
        with pytest.raises(UserError, match=said):
            read_stamp(written(tmp_path, text))


def test_folds_are_compared_with_a_run_by_patient(tmp_path: Path) -> None:
    cohort = write_features(tmp_path)
    assert main(["fit", *words(cohort, tmp_path / "run", "--train.epochs=1")]) == 0
    run = Run.open(tmp_path / "run")
    ours = read_predictions(run.predictions_file("test")).by_patient()
    head, rows = "PATIENT,label,pred,label_1,label_0,loss\n", []  # with its classes in another order
    for number, (patient, label) in enumerate(zip(ours.patients, ours.truth.tolist(), strict=True)):
        said = 0.9 - 0.1 * number
        rows.append(f"{patient},{label},1,{said},{1 - said},0.1\n")
    for number, part in enumerate((rows[::2], rows[1::2])):
        written(tmp_path, head + "".join(part), f"crossval/split-{number}/patient-preds.csv")
    theirs = read_stamp(tmp_path / "crossval")
    table = run.compare(theirs)
    assert table.loc["auc", "patients"] == len(ours.patients) == len(theirs)
    score = ours.SCORES["brier"]
    assert table.loc["brier", "other"] == pytest.approx(score(theirs.like(ours)))
    expected = paired_difference(ours, theirs.like(ours), score)
    assert table.loc["brier", "difference"] == pytest.approx(expected.value)
    written(tmp_path, head.replace("label_0", "label_2") + f"{ours.patients[0]},1,1,1,0,0\n")
    with pytest.raises(UserError, match="the classes are 1, 2 here and 0, 1 there"):
        run.compare(read_stamp(tmp_path / "patient-preds.csv"))
