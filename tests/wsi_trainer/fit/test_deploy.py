"""`wsi-train deploy`: runs on the slides of another hospital, in a folder of its own."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile

from tests.wsi_trainer.fit.feature_cohort import WIDTH, words
from tests.wsi_trainer.small import QUICK, VGG, rows
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.shift import shift
from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.fit.deployment import grouped_by
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.metrics import ClassPredictions, read_predictions
from wsi_trainer.metrics.decision import threshold
from wsi_trainer.metrics.table import join
from wsi_trainer.view.contents import contents_of

COLUMNS = ("slide", "label", "patient", "sex")


def hospital(folder: Path, seed: int, name: str, slides: int = 30, labels: Sequence[str] | None = None) -> Path:
    """Features of slides, two for each patient, whose first column tells the label."""
    random = np.random.default_rng(seed)
    (folder / "features").mkdir(parents=True)
    lines = []
    for number in range(slides):
        label = number // 2 % 2
        said = str(label) if labels is None else labels[number]
        lines.append([f"{name}{number}.svs", said, f"{name}-{number // 2}", "mf"[number % 2]])
        values = random.normal(size=(12, WIDTH))
        values[:, 0] += label
        with h5py.File(folder / "features" / f"{name}{number}.h5", "w") as file:
            file["features"] = values.astype(np.float32)
            file["coords"] = np.stack([np.arange(len(values)) * 64] * 2, axis=1)
    with (folder / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *lines])
    return folder / "manifest.csv"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folds, which decide by Youden's index."""
    folder = tmp_path_factory.mktemp("first")
    hospital(folder, 0, "a")
    assert main(["fit", *words(folder, folder / "cv", "--folds=2", "--train.decision=youden")]) == 0
    return folder / "cv"


def hashes(folder: Path) -> dict[Path, str]:
    return {path: sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def deploy(*more: str | Path) -> int:
    return main(["deploy", *map(str, more)])


@pytest.mark.slow
def test_folds_are_deployed_as_the_mean_of_what_they_predict(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [str(n // 2 % 2) if n < 24 else "" for n in range(30)]
    manifest = hospital(tmp_path / "b", 1, "b", labels=labels)
    before, features = hashes(study), f"--data.features={tmp_path / 'b' / 'features'}"
    out = tmp_path / "deployed"
    assert deploy(study, manifest, "--name", "external-1", "--out", out, "--subgroups", "sex,stage", features) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--subgroups sex,stage: the cohort has no column stage; it has label, sex, site" in said
    assert not out.exists(), "known before anything is predicted"
    assert deploy(study, manifest, "--name", "external-1", "--out", out, "--subgroups", "sex", features) == 0
    assert hashes(study) == before, "nothing is written into the runs"
    deployment = Deployment(out)
    found = {row["slide"]: row for row in rows(deployment.predictions_file)}
    each = [{row["slide"]: row for row in rows(run.result("predict").file)} for run in deployment.members.values()]
    assert len(found) == 30 and len(each) == 2
    for slide, row in found.items():
        mean = np.mean([float(one[slide]["probability_1"]) for one in each])
        assert float(row["probability_1"]) == mean

    facts = deployment.facts
    assert (facts["slides"], facts["labelled"], facts["patients"]) == (30, 24, 15)
    labelled = deployment.labelled()
    assert isinstance(labelled, ClassPredictions) and labelled.labels.tolist() == [n // 2 % 2 for n in range(24)]
    runs = list(Study.open(study).runs.values())
    for run in runs:
        assert not run.evaluation("val").is_file()
    checked = [read_predictions(run.writable / "validation.csv") for run in deployment.members.values()]
    joined = join(checked)
    assert isinstance(joined, ClassPredictions)
    cut = threshold(joined.labels == 1, joined.probabilities[:, 1], "youden")
    assert labelled.thresholds is not None and set(labelled.thresholds) == {cut}

    point, internal = facts["external"]["operating_points"]["label"], facts["internal"]["operating_points"]["label"]
    apart = facts["differences"]["operating_points"]["label"]["patient"]["sensitivity"]
    assert apart["value"] == point["patient"]["sensitivity"]["value"] - internal["patient"]["sensitivity"]["value"]
    assert facts["internal"]["slides"] == 30 and set(facts["each"]) == {"fold0", "fold1"}
    assert set(facts["subgroups"]["columns"]["sex"]) == {"m", "f"} and facts["subgroups"]["comparisons"] > 0
    assert facts["subgroups"]["in_several"] == {"sex": sorted(f"b-{number}" for number in range(12))}
    assert "patients with different sex on their slides" in " ".join(capsys.readouterr().out.split())
    page = " ".join(deployment.report.read_text().split())
    assert "external-1 less internal" in page and "By sex" in page and "none adjusted for their number" in page
    assert "AUC by slide, external-1" in page and "internal: each fold at its own threshold" in page
    assert "<th>by patient</th>" in page and "0 left out" in page and "one minus the probability" in page
    wrong = [line.startswith('"wrong"') for line in page[page.index("worst mistakes") :].split("<tr class=")[1:]]
    assert len(wrong) == 30 and wrong == sorted(wrong, reverse=True)
    assert deploy(study, manifest, "--name", "external-1", "--out", out, features) == 2, "kept"

    # Killed before its end: members that are done are kept.
    first = out / "members" / "fold0" / "predictions.csv"
    written, kept = first.stat().st_mtime_ns, (out / "deployment.json").read_bytes()
    deployment.write({**facts, "whole": False})
    (out / "members" / "fold1" / "predictions.csv").unlink()
    capsys.readouterr()
    assert main(["status", str(out)]) == 0 and "50% of the predictions" in capsys.readouterr().out
    for command in ("report", "view"):
        assert main([command, str(out)]) == 2 and "is not finished" in capsys.readouterr().err
    assert deploy(study, manifest, "--name", "external-1", "--out", out, "--subgroups", "sex", features) == 0
    assert first.stat().st_mtime_ns == written and (out / "deployment.json").read_bytes() == kept


def test_a_folder_of_features_without_labels_by_one_run(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hospital(tmp_path / "b", 1, "b", slides=4)
    assert deploy(study / "fold0", tmp_path / "b" / "features", "--name", "b") == 0
    deployment = Deployment(Path("deployments/b"))
    facts = deployment.facts
    assert facts["slides"] == 4 and facts["labelled"] == 0 and "external" not in facts
    assert {row["decision"] for row in rows(deployment.predictions_file)} <= {"0", "1"}
    assert "Scores" not in deployment.report.read_text()


def test_patients_of_training_are_refused_or_left_out(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = hospital(tmp_path / "b", 1, "b", slides=6)
    manifest.write_text(manifest.read_text().replace("b-1", "A-3"))  # another spelling of a patient
    options = [study / "fold0", manifest, "--out", tmp_path / "out", f"--data.features={tmp_path / 'b' / 'features'}"]
    assert deploy(*options) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "patients of the cohort are in the training cohort too: A-3" in said and "--in-both leave-out" in said
    assert not (tmp_path / "out").exists()
    assert deploy(*options, "--in-both", "leave-out") == 0
    facts = Deployment(tmp_path / "out").facts
    assert facts["slides"] == 4 and facts["left_out"] == {"patients in both": ["A-3"], "slides": ["b2.svs", "b3.svs"]}


def test_a_slide_of_training_is_known_under_another_name(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = hospital(tmp_path / "b", 1, "b", slides=4)
    copied = Run(study / "fold0").kept()[0]
    features = study.parent / "features" / f"{copied.slide.removesuffix('.svs')}.h5"
    (tmp_path / "b" / "features" / "b0.h5").write_bytes(features.read_bytes())
    words = [study / "fold0", manifest, "--out", tmp_path / "out", f"--data.features={tmp_path / 'b' / 'features'}"]
    assert deploy(*words) == 2
    assert "patients of the cohort are in the training cohort too: b-0" in " ".join(capsys.readouterr().err.split())


def test_runs_of_other_classes_are_not_averaged(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    manifest = hospital(folder, 3, "c")
    manifest.write_text(
        "\n".join(line.replace(",0,", ",benign,").replace(",1,", ",tumour,") for line in manifest.read_text().split())
    )
    task = "--model.task={class_path: BinaryTask, init_args: {classes: [benign, tumour]}}"
    assert main(["fit", *words(folder, folder / "run", task, "--train.epochs=1")]) == 0
    assert deploy(study / "fold0", folder / "run", manifest, "--out", tmp_path / "out") == 2
    assert "predicts something else than" in " ".join(capsys.readouterr().err.split())
    assert deploy(study, folder / "run", manifest, "--out", tmp_path / "out") == 2
    assert "is a study of several runs" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_slides_of_two_hospitals_with_maps_on_demand(
    manifest: Path, square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fit = ["fit", f"--out={run}", f"--data.manifest={manifest}", *VGG, *QUICK]
    assert main(fit) == 0
    before, (head, *lines) = hashes(run), square_slides.read_text().splitlines()
    other = square_slides.with_name("other.csv")
    patients = [line.replace("patient_", "other_") for line in lines[:4]]
    other.write_text("\n".join([head, *patients[:3], patients[3].replace(",0,", ",,").replace(",1,", ",,")]))
    assert deploy(run, other, "--out", tmp_path / "out", "--maps", "activation") == 0
    assert hashes(run) == before
    facts, page = Deployment(tmp_path / "out").facts, (tmp_path / "out" / "report.html").read_text()
    assert facts["slides"] == 4 and facts["labelled"] == 3 and facts["shift"]
    assert page.count('alt="map of') == 4 and "stain" in page.casefold()
    assert main(["status", str(run)]) == 0
    # The commands for runs, given the folder of the deployment.
    (tmp_path / "out" / "report.html").unlink()
    assert main(["report", str(tmp_path / "out")]) == 0 and (tmp_path / "out" / "report.html").stat().st_size > 10_000
    shown = contents_of(tmp_path / "out").slides
    assert sorted(len(one.maps) for one in shown) == [1] * 4
    assert sum(one.opinions[0] is not None for one in shown) == 3, "one has no label"
    assert main(["view", str(tmp_path / "out"), "--name", "other", "--static", str(tmp_path / "copy")]) == 2
    assert "--name is about a run" in capsys.readouterr().err
    assert deploy(run, other, "--out", tmp_path / "out") == 2
    assert "has a deployment already" in capsys.readouterr().err
    assert deploy(run, other, "--out", tmp_path / "out", "--overwrite", "--compare-slides", "false") == 0
    assert "shift" not in Deployment(tmp_path / "out").facts


@pytest.mark.slow
def test_survival_is_cut_where_training_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def survival(folder: Path, name: str, slides: int, seed: int) -> Path:
        manifest = hospital(folder, seed, name, slides)
        lines = manifest.read_text().split()
        random = np.random.default_rng(seed)
        times = [f"{random.exponential(4 if n // 2 % 2 else 12) + n // 2 / 100:.3f}" for n in range(0, slides, 2)]
        lines = [f"{line},{times[n // 2]},{int(n % 10 < 8)}" for n, line in enumerate(lines[1:])]
        manifest.write_text("\n".join([",".join((*COLUMNS, "time", "event")), *lines]))
        return manifest

    survival(tmp_path / "a", "a", 40, 0)
    for run in ("one", "two"):
        assert (
            main(["fit", *words(tmp_path / "a", tmp_path / run, "--model.task=CoxTask", f"--train.seed={len(run)}")])
            == 0
        )
    baseline = Run(tmp_path / "one").trained_risks["label"]
    split = {one.slide: one.split for one in Run(tmp_path / "one").kept()}
    manifest = survival(tmp_path / "b", "b", 40, 5)
    features = f"--data.features={tmp_path / 'b' / 'features'}"
    assert deploy(tmp_path / "one", manifest, "--out", tmp_path / "out", features) == 0
    facts = Deployment(tmp_path / "out").facts
    found = facts["external"]["survival"]["label"]
    risks = {row["slide"]: float(row["risk"]) for row in rows(Deployment(tmp_path / "out").predictions_file)}
    by_patient = [max(risks[f"b{n}.svs"], risks[f"b{n + 1}.svs"]) for n in range(0, 40, 2)]
    assert found["higher"]["patients"] == sum(risk > baseline["median"] for risk in by_patient)
    assert set(split.values()) == {"train", "val", "test"} and "integrated_brier" in found
    page = (tmp_path / "out" / "report.html").read_text()
    assert "hazard ratio" in page and "of them with event" in page
    assert "positive" not in page and "decided wrongly" not in page
    assert not list((tmp_path / "out" / "members").rglob("baseline.json")), "the run has it"
    # Several runs: risks on the scale of their training patients.
    both = [tmp_path / "one", tmp_path / "two", manifest, "--out", tmp_path / "mean", features]
    assert deploy(*both) == 0
    mean = Deployment(tmp_path / "mean")
    parts = [
        float(one["slope"]) * (float(rows(run.result("predict").file)[0]["risk"]) - float(one["median"]))
        for run in mean.members.values()
        for one in (run.trained_risks["label"],)
    ]
    assert float(rows(mean.predictions_file)[0]["risk"]) == pytest.approx(np.mean(parts))
    assert mean.facts["external"]["survival"]["label"]["higher"]["patients"] > 0


def test_what_is_unlike_training_comes_first(tmp_path: Path) -> None:
    def slides(name: str, stain: tuple[int, int, int], mpp: float, ages: Sequence[str]) -> list[SlideRecord]:
        random, records = np.random.default_rng(0), []
        for number, age in enumerate(ages):
            pixels = np.full((256, 256, 3), 245, np.uint8)
            pixels[60:200, 60:200] = np.clip(random.normal(stain, 4, (140, 140, 3)), 0, 255)
            path = tmp_path / f"{name}{number}.tif"
            tifffile.imwrite(path, pixels, tile=(128, 128), photometric="rgb", resolution=(1e4 / mpp, 1e4 / mpp),
                             resolutionunit="CENTIMETER")  # fmt: skip
            records.append(SlideRecord(path.name, path, str(number % 2), f"{name}{number}", "train", "", {"age": age}))
        return records

    training = slides("a", (190, 120, 170), 0.5, ["50", "61", "55", "47", "58", "52"])
    alike = slides("b", (190, 120, 170), 0.5, ["51", "60", "55", "48", "57", "53"])
    assert not any(one.unlike for one in shift(training, alike, {"label"}))
    other = slides("c", (150, 90, 190), 0.25, ["49", "", "", "61", "55", "52"])
    found = shift(training, other, {"label"})
    unlike = [one.name for one in found if one.unlike]
    assert {"µm a pixel", "haematoxylin", "age (empty)"} <= set(unlike)
    assert found[0].unlike and [one.unlike for one in found] == sorted((one.unlike for one in found), reverse=True)
    assert next(one for one in found if one.name == "µm a pixel").cohort.startswith("0.25")
    assert not {"label", "site"} & {one.name for one in found}
    (gone,) = shift(training, [replace(one, others={}, path=tmp_path / "none") for one in other], {"label"})
    assert (gone.name, gone.training, gone.cohort, gone.unlike) == ("age (absent)", "0 % empty", "absent", True)


def test_many_numbers_are_two_groups_and_few_are_each_its_own() -> None:
    ages = [str(number) for number in range(40, 60)] + [""]
    assert {name: len(rows) for name, rows in grouped_by(ages).items()} == {
        "above 49.5": 10, "not known": 1, "up to 49.5": 10,
    }  # fmt: skip
    assert {name: len(rows) for name, rows in grouped_by(["40", "41", "50", "60", "71"]).items()} == {
        "above 50": 2, "up to 50": 3,
    }  # fmt: skip
    assert set(grouped_by(["1", "2", "3", "1", "4", ""])) == {"1", "2", "3", "4", "not known"}
    assert set(grouped_by(["I", "II", "I", ""])) == {"I", "II", "not known"}
