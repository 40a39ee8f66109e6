"""Runs with covariates: what a label depends on half on the slide, half on a column of the manifest."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml

from tests.wsi_trainer.fit.feature_cohort import WIDTH
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.fit.predictor import Predictor
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.io.files import read_json
from wsi_trainer.io.tables import read_table
from wsi_trainer.metrics import auc, read_predictions

HEAD = ["slide", "split", "patient", "label", "age", "sex", "copy"]
SPLIT = ["train"] * 24 + ["val"] * 6 + ["test"] * 24


def write_cohort(folder: Path, seed: int, slides: int, splits: list[str] | None) -> Path:
    """Slides whose label is the sign of a feature plus an age, of which some are missing; sex says nothing."""
    random = np.random.default_rng(seed)
    (folder / "features").mkdir(parents=True)
    rows = []
    for number in range(slides):
        shown, age = random.normal(size=2)
        label = int(shown + age > 0)
        cell = ("", "NA")[number % 4 // 2] if number % 10 == 9 else f"{60 + 12 * age:.1f}"
        split = "" if splits is None else splits[number]
        rows.append([f"s{seed}-{number}.svs", split, f"p{seed}-{number}", label, cell, "mf"[number % 2], label])
        values = random.normal(size=(5, WIDTH)) * 0.3
        values[:, 0] += shown
        with h5py.File(folder / "features" / f"s{seed}-{number}.h5", "w") as file:
            file["features"] = values.astype(np.float32)
            file["coords"] = np.stack([np.arange(5) * 64, np.zeros(5, int)], axis=1)
    with (folder / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEAD, *rows])
    return folder


def words(cohort: Path, out: Path, *more: str) -> list[str]:
    return [
        f"--data.manifest={cohort / 'manifest.csv'}", f"--data.features={cohort / 'features'}",
        f"--model.backbone={{name: features, width: {WIDTH}}}", "--model.head=mean", f"--out={out}",
        "--train.epochs=8", "--train.budget=null", "--train.resamples=20", "--train.accelerator=cpu",
        "--train.loggers=[csv]", "--train.checkpoint_every=0",
        "--model.learning_rate=0.03", "--model.covariates_learning_rate=0.1",
        "--model.covariates=[age, sex]", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cohort(tmp_path_factory.mktemp("cohort"), 2, len(SPLIT), SPLIT)


@pytest.fixture(scope="module")
def study(cohort: Path) -> Study:
    """The ablation: both, the slide alone, the covariates alone."""
    assert main(["fit", *words(cohort, cohort / "ablation", "--compare=covariates")]) == 0
    return Study.open(cohort / "ablation")


@pytest.fixture(scope="module")
def run(study: Study) -> Run:
    return Run.open(study.path / "run")


def covariates_in(run: Run) -> dict[str, dict[str, object]]:
    return yaml.safe_load(run.config.read_text())["model"]["covariates"]


@pytest.mark.slow
def test_both_are_better_than_either(study: Study) -> None:
    facts = read_json(study.results)
    both, slide, alone = facts["scores"]["auc"]["values"]
    assert both > max(slide, alone) + 0.05 and min(slide, alone) > 0.55
    predictions = [read_predictions(run.predictions_file("test")) for run in study.runs.values()]
    assert [auc(one) for one in predictions] == [both, slide, alone]
    gains = [one["value"] for one in facts["scores"]["auc"]["differences"]]
    assert gains == pytest.approx([both - slide, both - alone])
    assert list(study.table().columns[:3]) == ["slide and covariates", "slide alone", "covariates alone"]
    page = (study.path / "report.html").read_text()
    assert "slide and covariates less covariates alone" in page and "<td>age: missing</td><td>2 (8 %)</td>" in page


def test_a_checklist_says_what_the_run_knows(run: Run, tmp_path: Path) -> None:
    assert main(["report", str(run.path), f"--checklist={tmp_path / 'tripod.csv'}"]) == 0
    rows = {row["item"]: row for _, row in read_table(tmp_path / "tripod.csv").rows}
    known = {item: row["what the run knows"] for item, row in rows.items()}
    assert len({item.rstrip("abcdefg") for item in rows}) == 27
    assert known["5a"] == "train 24 slides of 24 patients; val 6 slides of 6 patients; test 24 slides of 24 patients"
    assert "age: missing train 2 (8 %)" in known["11"] and known["23a"].startswith("auc 0.") and not known["17"]
    page = run.report.read_text()
    assert "What these numbers do not say" in page and "24 patients were trained on" in page
    assert "<th>slide</th><th>name</th>" not in page, "a run on features has no pictures"


def test_covariates_alone_open_no_slide(study: Study, cohort: Path, tmp_path: Path) -> None:
    run = Run.open(study.path / "covariates")
    assert run.loaded.model.state_dict().keys() & {"covariate_classifier.weight", "head.weight"} == {
        "covariate_classifier.weight"
    }
    said = run.predict("anywhere.svs", {"age": 80, "sex": "m"})
    assert said["probability_1"] > run.predict("anywhere.svs", {"age": 40, "sex": "m"})["probability_1"]
    assert main(["heatmap", str(run.path)]) == 2


def test_columns_are_fitted_on_training_slides(cohort: Path, run: Run, tmp_path: Path) -> None:
    rows = [row for row in csv.DictReader((cohort / "manifest.csv").open()) if row["split"] == "train"]
    ages = np.array([float(row["age"]) for row in rows if row["age"] not in ("", "NA")])
    kept = covariates_in(run)
    assert kept["age"] == {"mean": pytest.approx(ages.mean()), "std": pytest.approx(ages.std())}
    assert kept["sex"] == {"categories": ["f", "m"]} and run.splits.read_text().count(",NA,") == 2
    # Another value of one held-out slide, and a category that training has not: no other slide's numbers change.
    text = (cohort / "manifest.csv").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("s2-40.svs")]
    before, other = ["s2-40.svs", "test", "p2-40", row.split(",")[3]], tmp_path / "other.csv"
    other.write_text(text.replace(row, ",".join([*before, "20", "x", row.split(",")[6]])))
    tables = []
    for path in (cohort / "manifest.csv", other):
        assert main(["predict", str(run.path), str(path), f"--name={path.stem}"]) == 0
        tables.append([row for _, row in read_table(run.path / "cohorts" / path.stem / "predictions.csv").rows])
    differ = [one["slide"] for one, two in zip(*tables) if one != two]
    assert differ == ["s2-40.svs"]
    files = cohort / "features" / "s2-40.h5"
    unseen = run.predictor.predict(files, {"age": 20, "sex": "x"}).to_dict()
    assert unseen == run.predictor.predict(files, {"age": 20, "sex": None}).to_dict()
    assert float(tables[1][40]["probability_1"]) == pytest.approx(unseen["probability_1"])


def test_predictions_are_those_of_pytorch(cohort: Path, run: Run) -> None:
    """The last layer on the standardised vector and the covariates side by side, as one would write it."""
    state = torch.load(run.checkpoint(), weights_only=True)["state_dict"]
    kept = covariates_in(run)["age"]
    layer = torch.nn.Linear(WIDTH + 5, state["classifier.weight"].shape[0])
    layer.weight.data = torch.cat([state["classifier.weight"], state["covariate_classifier.weight"]], dim=1)
    layer.bias.data = state["classifier.bias"]
    predictions = {row["slide"]: row for _, row in read_table(run.predictions_file("test")).rows}
    for record in read_manifest(cohort / "manifest.csv"):
        if record.split == "test":
            with h5py.File(cohort / "features" / record.slide.replace("svs", "h5")) as file:
                pooled = torch.from_numpy(file["features"][:]).mean(dim=0)
            floor = (0.01 * state["standardise.mean"]) ** 2 + 1e-8
            vector = (pooled - state["standardise.mean"]) / (state["standardise.variance"] + floor).sqrt()
            age, sex = record.others["age"], record.others["sex"]
            missing = age in ("", "NA")
            z = 0.0 if missing else (float(age) - kept["mean"]) / kept["std"]
            beside = torch.tensor([z, float(missing), float(sex == "f"), float(sex == "m"), 0.0])
            found = torch.sigmoid(layer(torch.cat([vector, beside]))[0])
            assert float(predictions[record.slide]["probability_1"]) == pytest.approx(found.item(), abs=1e-6)


def test_an_exported_model_alone(cohort: Path, run: Run, tmp_path: Path) -> None:
    assert main(["export", str(run.path), f"--out={tmp_path / 'model'}"]) == 0
    shutil.copy(cohort / "features" / "s2-31.h5", tmp_path)
    predictor = Predictor.from_pretrained(tmp_path / "model")
    record = next(one for one in read_manifest(cohort / "manifest.csv") if one.slide == "s2-31.svs")
    given = {name: record.others[name] for name in ("age", "sex")}
    found = predictor.predict(tmp_path / "s2-31.h5", given).to_dict()
    assert found == run.predict(cohort / "s2-31.svs"), "of its own the run knows them"
    for wrong in ({}, {"age": 3}, {**given, "grade": 3}):
        with pytest.raises(Exception, match="and the model takes age, sex; give these"):
            predictor.predict(tmp_path / "s2-31.h5", wrong)
    with pytest.raises(Exception, match=r"has no column 'age'.*or --data\.absent_covariates missing"):
        predictor.predict(tmp_path / "s2-31.h5")
    assert "| beside the slide | sex (category: f, m) |" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.slow
def test_a_deployment_and_columns_that_a_cohort_lacks(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_cohort(tmp_path / "other", 7, 12, None)
    more = [f"--data.features={other / 'features'}"]
    words = ["deploy", str(run.path), str(other / "manifest.csv"), *more]
    assert main([*words, f"--out={tmp_path / 'd'}", "--name=d"]) == 0
    facts = Deployment(tmp_path / "d").facts
    assert {"age", "age (empty)"} <= {one["name"] for one in facts["shift"]} and facts["labelled"] == 12
    page = (tmp_path / "d" / "report.html").read_text()
    assert "What these numbers do not say" in page and "<th>training</th><th>deployment</th>" in page
    lacking = tmp_path / "lacking.csv"
    lacking.write_text("\n".join(line.rsplit(",", 3)[0] for line in (other / "manifest.csv").read_text().splitlines()))
    words = [word.replace("other/manifest.csv", "lacking.csv") for word in words]
    words = [*words, f"--out={tmp_path / 'l'}", "--name=l"]
    capsys.readouterr()
    assert main(words) == 2
    assert "slide s7-0.svs has no column 'age'" in capsys.readouterr().err
    assert main([*words, "--data.absent_covariates=missing"]) == 0
    assert "age, which the model takes beside the slide, is missing of all" in " ".join(capsys.readouterr().out.split())
    assert Deployment(tmp_path / "l").facts["missing_covariates"] == ["age", "sex"]
    assert "<b>age, sex are missing of all slides</b>" in (tmp_path / "l" / "report.html").read_text()
    cohort = ["test", str(run.path), f"--cohort={lacking}", f"--data_root={other}", *more]
    assert main(cohort) == 2 and "has no column 'age'" in capsys.readouterr().err
    assert main([*cohort, "--data.absent_covariates=missing"]) == 0
    assert main(["heatmap", str(run.path), "--name=lacking", "--method=activation"]) == 0, "it is remembered"


@pytest.mark.slow
def test_a_run_goes_on_with_its_numbers(cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "manifest.csv"
    shutil.copy(cohort / "manifest.csv", manifest)
    out = tmp_path / "run"
    own = [*words(cohort, out, f"--data.manifest={manifest}", "--train.epochs=1"), f"--data.root={cohort}"]
    assert main(["fit", *own]) == 0
    before = covariates_in(Run(out))
    manifest.write_text(manifest.read_text().replace(",f,", ",m,"))
    capsys.readouterr()
    assert main(["fit", *own, "--train.epochs=2", "--resume=last"]) == 0
    assert covariates_in(Run(out)) == before
    assert "with other covariates in the manifest; the run keeps those it began with" in capsys.readouterr().out
    assert main(["fit", str(out), "--train.epochs=3"]) == 0
    assert main(["fit", *own, "--model.covariates=[age]", "--resume=last"]) == 2
    assert "a run goes on with the model that it began with" in capsys.readouterr().err
    # A config that is copied is fitted anew.
    text = json.dumps(yaml.safe_load((out / "config.yaml").read_text()))
    (tmp_path / "copy.json").write_text(text)
    fewer = tmp_path / "fewer.csv"
    fewer.write_text(
        "\n".join(line for number, line in enumerate(manifest.read_text().splitlines()) if number % 3 != 1)
    )
    more = [f"--data.manifest={fewer}", "--folds=2", "--train.epochs=1", f"--out={tmp_path / 'folds'}"]
    assert main(["fit", f"--config={tmp_path / 'copy.json'}", *more]) == 0
    means = [covariates_in(Run(tmp_path / "folds" / fold))["age"]["mean"] for fold in ("fold0", "fold1")]
    assert len({*means, before["age"]["mean"]}) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.covariates=[label]"], "the column 'label' is the label; leave it out"),
        (["--model.covariates=[split]"], "the column 'split' is which slide it is"),
        (["--model.covariates=[copy]"], "the column 'copy' is the label label in each training slide"),
        (["--model.covariates=[grade]"], "has no column 'grade', which the model takes"),
        (["--model.covariates={sex: number}"], "has 'm' in the column 'sex', a number in model.covariates"),
        (["--model.covariates={age: category}"], "values in 22 training slides, as a name has"),
        (["--model.covariates={sex: word}"], "model.covariates.sex is word; give number or category"),
        (["--model.backbone=none", "--model.covariates=null"], "nothing can be learnt"),
        (["--model.backbone=none", "--train.budget=auto"], "set train.budget to null"),
    ],
)
def test_what_is_no_covariate_is_one_line(
    cohort: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words(cohort, tmp_path / "run", *more)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
