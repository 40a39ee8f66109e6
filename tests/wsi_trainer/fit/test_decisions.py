"""A threshold is chosen on the validation slides, kept with the run, and used in test, cohorts, predict and report."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.wsi_trainer.fit.feature_cohort import words, write_features
from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.fit.predictor import Predictor
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json, write_json
from wsi_trainer.metrics import SCORES, Predictions, read_predictions


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(tmp_path_factory.mktemp("cohort"))


@pytest.fixture(scope="module")
def run(cohort: Path) -> Run:
    assert main(["fit", *words(cohort, cohort / "run", "--train.decision=f1")]) == 0
    return Run.open(cohort / "run")


def kept(run: Run) -> float:
    record = read_json(run.decisions)["best"]
    assert record["rule"] == "f1"
    (threshold,) = record["targets"]["label"]["thresholds"]
    return float(threshold)


def decided(predictions: Predictions, threshold: float) -> list[str]:
    positive = np.array(predictions.columns()["probability_1"]) >= threshold
    assert [predictions.words(row).predicted for row in range(len(predictions))] == [str(int(one)) for one in positive]
    return [str(int(one)) for one in positive]


def test_it_is_the_best_on_validation_slides_and_decides_on_those_of_test(run: Run) -> None:
    threshold = kept(run)
    decided(read_predictions(run.predictions_file("test")), threshold)
    scores = read_json(run.evaluation("test"))
    assert scores["decisions"] == [f"decided for 1 from a probability of {threshold:.3f} on (train.decision: f1)"]
    assert main(["validate", str(run.path)]) == 0
    validated = read_predictions(run.predictions_file("val"))
    decided(validated, threshold)
    cuts = [*np.array(validated.columns()["probability_1"]), threshold]
    assert read_json(run.evaluation("val"))["slide"]["f1"]["value"] == SCORES["f1"](validated)
    (own,) = validated.by_target.values()
    best = [SCORES["f1"](own.decided_by(type(one)((cut,)))) for cut in cuts for one in [own.chosen("f1")] if one]
    assert SCORES["f1"](validated) == max(best) and kept(run) == threshold


def test_cohorts_predictions_and_report_decide_alike(run: Run, cohort: Path, tmp_path: Path) -> None:
    threshold = kept(run)
    head, *lines = (cohort / "manifest.csv").read_text().splitlines()
    other = tmp_path / "other.csv"
    other.write_text("\n".join([head, *(line for line in lines if ",test," in line)]))
    assert main(["test", str(run.path), f"--cohort={other}"]) == 0
    tested = decided(read_predictions(run.of_cohort("other").predictions_file("test")), threshold)
    assert main(["predict", str(run.path), str(other), "--name=new"]) == 0
    with (run.of_cohort("new").results / "predictions.csv").open(newline="") as file:
        assert [row["decision"] for row in csv.DictReader(file)] == tested
    assert main(["report", str(run.path)]) == 0
    assert f"from a probability of {threshold:.3f} on" in run.report.read_text()


@pytest.mark.parametrize("threshold", [1e-6, 1 - 1e-6])
def test_a_prediction_and_an_exported_model_decide_as_the_run(
    threshold: float, run: Run, cohort: Path, tmp_path: Path
) -> None:
    """At one of the two thresholds that is not the most probable class."""
    pytest.importorskip("safetensors")
    shutil.copytree(run.path, tmp_path / "run")
    mine = Run.open(tmp_path / "run")
    record = read_json(mine.decisions)
    record["best"]["targets"]["label"]["thresholds"] = [threshold]
    write_json(mine.decisions, record)
    slides = [cohort / f"s{number}.svs" for number in (20, 21)]
    files = [cohort / "features" / f"s{number}.h5" for number in (20, 21)]
    assert main(["export", str(mine.path), f"--out={tmp_path / 'model'}"]) == 0
    assert f"from a probability of {threshold:.3f} on" in (tmp_path / "model" / "README.md").read_text()
    shutil.rmtree(mine.path / "cohorts", ignore_errors=True)
    Predictor.open(tmp_path / "model").save_pretrained(tmp_path / "again")
    expected = "1" if threshold < 0.5 else "0"
    for origin in ("run", "model", "again"):
        predictor = Predictor.open(tmp_path / origin)
        found = [predictor.predict(file) for file in files]
        assert [one.decision for one in found] == [expected] * 2
        assert found[0].decisions == {"label": expected} and repr(found[0]).endswith(f"decided for {expected}")
    likely = [one.names[one.values.argmax()].removeprefix("probability_") for one in found]
    assert mine.predict(slides)["decision"].tolist() == [expected] * 2
    about = read_json(tmp_path / "model" / "about.json")
    assert about.pop("decided")["rule"] == "f1"
    write_json(tmp_path / "model" / "about.json", about)  # as a folder of before
    before = Predictor.open(tmp_path / "model")
    assert [before.predict(file).decision for file in files] == likely
    chosen = Predictor.open(tmp_path / "again", overrides=[f"--train.decision={1 - threshold}"])
    assert {chosen.predict(file).decision for file in files} == {"0", "1"} - {expected}
    mine.decisions.unlink()
    undecided = Run.open(mine.path)
    with pytest.raises(UserError, match="wsi-train validate"):
        _ = undecided.predictor.predict(files[0]).decision
    with pytest.raises(UserError, match="wsi-train validate"):
        undecided.predictor.save_pretrained(tmp_path / "undecided")
    assert list(undecided.predict(files[0])) == ["probability_0", "probability_1"]


def test_a_run_without_one_is_as_it_was_and_may_choose_one_later(run: Run, cohort: Path, tmp_path: Path) -> None:
    """The config of a run of 1.0 has no such key; nothing else than what is decided changes."""
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    (folder / "decisions.json").unlink()
    config = folder / "config.yaml"
    config.write_text("".join(line for line in config.open() if "decision" not in line))
    plain = Run.open(folder)
    assert main(["test", str(folder), "--overwrite"]) == 0
    first = read_json(plain.evaluation("test"))
    assert "decisions" not in first and not plain.decisions.exists()
    assert "thresholds" not in plain.predictions_file("test").with_suffix(".targets.json").read_text()
    assert main(["predict", str(folder), str(cohort / "manifest.csv"), "--name=later"]) == 0
    assert "decision" not in (plain.of_cohort("later").results / "predictions.csv").read_text()
    assert main(["test", str(folder), "--overwrite", "--train.decision=f1"]) == 0
    assert kept(plain) == kept(run)
    second, before = read_json(plain.evaluation("test")), read_json(run.evaluation("test"))
    assert second["slide"] == before["slide"] and second["slide"]["auc"] == first["slide"]["auc"]
    assert main(["test", str(folder), "--overwrite", "--train.decision=0.125"]) == 0
    decided(read_predictions(plain.predictions_file("test")), 0.125)
    assert json.loads(plain.decisions.read_text())["best"]["rule"] == "f1"


def test_where_a_threshold_decides_nothing_it_is_refused(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--model.task={name: cox}", "--train.decision=f1"]
    assert main(["fit", *words(cohort, tmp_path / "run", *more)]) == 2
    assert "a threshold for two classes or for several labels, and CoxTask has none" in capsys.readouterr().err
