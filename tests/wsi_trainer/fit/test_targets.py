"""A run of several targets on features: from a manifest with empty cells to scores, report, folds and cohorts."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from tests.wsi_trainer.fit.feature_cohort import words, write_features
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import MultiTargetPredictions, kinds_of, read_predictions
from wsi_trainer.view.contents import contents_of

TARGETS = (
    "{tumour: {name: binary, column: tumour}, grade: {name: ordinal, classes: [low, mid, high], column: grade}, "
    "survival: {name: survival, intervals: 2}}"
)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(tmp_path_factory.mktemp("cohort"))


@pytest.fixture(scope="module")
def run(cohort: Path) -> Run:
    more = [f"--model.targets={TARGETS}", "--model.target_weights={survival: 0.5}"]
    assert main(["fit", *words(cohort, cohort / "run", *more, "--train.monitor=val_grade_brier")]) == 0
    return Run.open(cohort / "run")


def test_each_target_is_scored_where_it_is_known(run: Run, cohort: Path) -> None:
    predictions = read_predictions(run.predictions_file("test"))
    slides = {name: part.slides for name, part in predictions.by_target.items()}
    assert slides == {
        "tumour": ("s18.svs", "s19.svs", "s20.svs", "s21.svs", "s22.svs", "s23.svs"),
        "grade": ("s18.svs", "s19.svs", "s21.svs", "s22.svs"),
        "survival": ("s18.svs", "s20.svs", "s21.svs", "s22.svs", "s23.svs"),
    }
    with run.predictions_file("test").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["grade_label"] for row in table] == ["low", "low", "", "mid", "high", ""]
    assert all(float(row["grade_probability_low"]) > 0 and float(row["risk"]) for row in table), "of each slide"
    scores = read_json(run.evaluation("test"))
    assert scores["targets"]["grade"] == {"slides": 4, "patients": 3}
    assert {"auc", "grade_quadratic_kappa", "survival_c_index"} <= set(scores["slide"])
    assert set(scores["per_class"]) == {"0", "1"} and set(scores["grade_per_class"]) == {"low", "mid", "high"}
    for name, part in predictions.by_target.items():
        alone = {key.removeprefix(f"{name}_"): value for key, value in scores["slide"].items()}
        for key, score in list(part.SCORES.items())[:1]:
            assert alone[key]["value"] == pytest.approx(score(part), nan_ok=True)
    assert run.loaded.model.task.by_target["tumour"].columns == ("tumour",)


@pytest.mark.slow
def test_what_a_table_is_of_lies_beside_it(run: Run, tmp_path: Path) -> None:
    """Columns alone would not tell: both classes have labels and probabilities."""
    path = run.predictions_file("test")
    declared = json.loads(path.with_suffix(".targets.json").read_text())["targets"]
    assert [(name, one["kind"], one["prefix"]) for name, one in declared.items()] == [
        ("tumour", "classes", ""), ("grade", "classes", "grade_"), ("survival", "risk", ""),
    ]  # fmt: skip
    first = read_predictions(path)
    assert isinstance(first, MultiTargetPredictions)
    (tmp_path / "test.csv").write_bytes(path.read_bytes())
    assert kinds_of(read_predictions(tmp_path / "test.csv")) != kinds_of(first)
    (tmp_path / "test.targets.json").write_text('{"targets": {"label": {"kind": "picture"}}}')
    assert main(["report", str(run.path), f"--out={tmp_path / 'page.html'}"]) == 0
    with pytest.raises(Exception, match=r"test\.targets\.json does not say what test\.csv is of"):
        read_predictions(tmp_path / "test.csv")


@pytest.mark.slow
def test_report_viewer_and_notebook_show_all_targets(run: Run) -> None:
    assert main(["report", str(run.path)]) == 0
    page = run.report.read_text()
    assert "Results by class of grade" in page and "grade: Confusion" in page and "survival: Survival" in page
    assert "grade: unknown" in page
    shown = {slide.name: slide for slide in contents_of(run.path).slides}
    opinion = shown["s20.svs"].opinions[0]
    assert opinion is not None and "grade: " in opinion.predicted and "survival: risk" in opinion.predicted
    assert "tumour: BinaryTask, grade: OrdinalTask, survival: HazardTask" in repr(run)
    table = run.compare(run)
    assert (table["difference"] == 0).all() and "survival_c_index" in table.index


def test_a_cohort_and_slides_without_labels(run: Run, cohort: Path, tmp_path: Path) -> None:
    head, *lines = (cohort / "manifest.csv").read_text().splitlines()
    other = tmp_path / "other.csv"
    other.write_text("\n".join([head, *lines]))
    assert main(["predict", str(run.path), str(other), "--name=all"]) == 0
    columns = (run.path / "cohorts" / "all" / "predictions.csv").read_text().splitlines()[0]
    assert columns == "slide,patient," + ",".join(run.loaded.model.task.names)
    other.write_text("\n".join([head, *(line for line in lines if ",test," in line)]))
    assert main(["test", str(run.path), f"--cohort={other}"]) == 0
    scored = read_predictions(run.of_cohort("other").predictions_file("test"))
    assert scored.columns().keys() == read_predictions(run.predictions_file("test")).columns().keys()


@pytest.mark.slow
def test_folds_of_several_targets(cohort: Path, tmp_path: Path) -> None:
    free = tmp_path / "free.csv"
    free.write_text(re.sub(",(train|val|test),", ",,", (cohort / "manifest.csv").read_text()))
    more = [f"--model.targets={TARGETS}", f"--data.manifest={free}", "--folds=2", "--train.epochs=1"]
    assert main(["fit", *words(cohort, tmp_path / "cv", *more)]) == 0
    facts = read_json(tmp_path / "cv" / "cross_validation.json")
    assert {"auc", "grade_auc", "survival_c_index"} <= set(facts["pooled"])
    assert main(["report", str(tmp_path / "cv")]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.targets={a: binary}", "--model.task=binary"], "model.targets and model.task both say"),
        (["--model.target_weights={a: 2}"], "model.target_weights is for model.targets"),
        (["--model.targets={a: binry}"], "there is no 'binry'"),
        ([f"--model.targets={TARGETS}", "--train.monitor=val_kappa"], "val_grade_quadratic_kappa"),
        (["--model.targets={a: {name: binary, column: tumour}, b: {name: binary, column: x}}"], "has no column 'x'"),
    ],
)
def test_what_is_wrong_is_one_line(
    more: list[str], message: str, cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words(cohort, tmp_path / "run", *more)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
