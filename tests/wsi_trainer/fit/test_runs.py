"""A run in use: copied, on another cohort, after its slides were replaced, renamed or moved, and from Python."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from lightning_plugin import Plan
from lightning_plugin.plans import Planner
from tests.wsi_trainer.small import QUICK, VGG, rows
from wsi_trainer.cli import main
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import read_predictions
from wsi_trainer.models import SlideClassifier, SlideSegmenter
from wsi_trainer.preprocess.command import preprocess
from wsi_trainer.synthetic import generate

SPLITS = {"train": 0.5, "val": 0.25, "test": 0.25}


def files_of(folder: Path) -> dict[str, bytes]:
    """All files of a run but those that say how it went."""
    said = ("log.txt", "status.json")
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in said and not p.name.endswith(".lock"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def stores_of(folder: Path, seed: int, slides: int, size: int = 192) -> Path:
    """Slides of a seed, converted; the manifest names the stores."""
    manifest = generate(folder / "slides", slides=slides, seed=seed, shape=(size, size), splits=SPLITS, workers=1)
    assert preprocess(str(manifest), folder / "stores", stall_minutes=0, workers=1) in (0, None)
    lines = ["slide,label,patient,split"]
    for row in rows(manifest):
        (store,) = (folder / "stores").rglob(f"{Path(row['slide']).stem}.zarr")
        lines.append(f"{store.relative_to(folder / 'stores')},{row['label']},{row['patient']},{row['split']}")
    (folder / "stores" / "list.csv").write_text("\n".join(lines) + "\n")
    return folder / "stores" / "list.csv"


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cohort of stores, and a run on it."""
    folder = tmp_path_factory.mktemp("cohort")
    manifest = stores_of(folder, seed=1, slides=12)
    words = [f"--out={folder / 'runs' / 'first'}", f"--data.manifest={manifest}", *VGG, *QUICK, "--train.budget=64MiB"]
    assert main(["fit", *words, "--train.loggers=[csv]"]) == 0
    return folder


@pytest.fixture
def moved(cohort: Path, tmp_path: Path) -> Path:
    """A copy of all that, elsewhere; the copied run names the slides where they were."""
    shutil.copytree(cohort, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of another cohort, of slides of the same names."""
    return stores_of(tmp_path_factory.mktemp("external"), seed=9, slides=8)


@pytest.mark.slow
def test_another_cohort_is_tested_whole_in_a_folder_of_its_own(
    moved: Path, external: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = moved / "runs" / "first"
    before = files_of(run)
    test = ["test", str(run), f"--cohort={external}", "--name=external-1"]
    assert main(test) == 0
    assert "8 slides of" in (said := capsys.readouterr().out) and "in the cohort external-1" in said
    assert main(test) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert main(["report", str(run), "--name=external-1"]) == 0
    assert "the cohort external-1, which the run was not trained on" in Run(run, cohort="external-1").report.read_text()
    after = files_of(run)
    assert {name: after[name] for name in before} == before
    assert main(["heatmap", str(run), "--name=nowhere"]) == 2
    said = capsys.readouterr().err
    assert "no list of the slides of cohort 'nowhere'" in said and "has the cohorts: external-1" in said


@pytest.mark.slow
def test_predicted_slides_are_a_cohort_of_which_there_are_no_scores(
    moved: Path, external: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = moved / "runs" / "first"
    assert main(["predict", str(run), str(external), "--name=p1"]) == 0
    cohort = Run.open(run, cohort="p1")
    assert [record.slide for record in cohort.records("test")] == [slide for slide, _ in _labels(external)]
    assert main(["heatmap", str(run), "--name=p1", "--top=0"]) == 0
    assert main(["view", str(run), "--name=p1", f"--static={tmp_path / 'page'}"]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--name=p1"]) == 2
    said = capsys.readouterr().err
    assert "the cohort p1 has no scores" in said and "--name p1` scores slides with labels" in said
    assert main(["test", str(run), f"--cohort={external}", "--name=p1"]) == 0
    tested = cohort.splits.read_bytes()
    assert main(["predict", str(run), str(external), "--name=p1", "--overwrite"]) == 0
    assert cohort.splits.read_bytes() == tested, "the slides of the scores"
    assert main(["report", str(run), "--name=p1"]) == 0


def test_a_predicted_cohort_of_an_earlier_version_is_named(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (moved / "runs" / "first" / "cohorts" / "p1").mkdir(parents=True)
    assert main(["report", str(moved / "runs" / "first"), "--name=p1"]) == 2
    said = capsys.readouterr().err
    assert "give the command that made it again" in said and "has the cohorts: none" in said


def test_a_folder_of_folds_is_no_run(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(moved / "runs" / "first")
    shutil.rmtree(run.checkpoints)
    (run.path / "cross_validation.json").write_text("{}")
    assert main(["validate", str(run.path)]) == 2
    assert f"holds a run for each fold; take one of them, such as {run.path / 'fold0'}" in capsys.readouterr().err


def test_slides_of_the_run_are_no_other_cohort(
    moved: Path, external: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever they lie and whatever they are called: their checksums are those of slides that were trained on."""
    run = Run.open(moved / "runs" / "first")
    trained = [record for record in run.kept() if record.split == "train"]
    shutil.copytree(trained[0].path, tmp_path / "renamed.zarr")
    strangers = [f"{external.parent / name},{label}" for name, label in _labels(external)[:3]]
    lines = ["slide,label", *strangers, f"renamed.zarr,{trained[0].label}", f"{trained[1].path},{trained[1].label}"]
    (tmp_path / "mixed.csv").write_text("\n".join(lines) + "\n")
    assert main(["test", str(run.path), f"--cohort={tmp_path / 'mixed.csv'}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 slides were in the split train of the run, left out: renamed.zarr" in said
    assert len(read_predictions(Run.open(run.path, cohort="mixed").predictions_file("test"))) == 3


def _labels(manifest: Path) -> list[tuple[str, str]]:
    return [(row["slide"], row["label"]) for row in rows(manifest)]


def test_keys_that_say_what_a_run_is_are_refused(
    moved: Path, external: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = moved / "runs" / "first"
    before = files_of(run)
    for word in (f"--data.manifest={external}", "--model.learning_rate=1"):
        assert main(["test", str(run), word, "--overwrite"]) == 2
        assert "is part of what the run is" in (error := capsys.readouterr().err) and "--cohort MANIFEST.csv" in error
    assert files_of(run) == before


def test_a_copied_run_is_used_from_any_folder(moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = moved / "runs" / "first"
    before = (run / "predictions" / "test.csv").read_bytes()
    assert main(["test", str(run), "--overwrite"]) == 0
    assert (run / "predictions" / "test.csv").read_bytes() == before
    assert main(["fit", str(run), "--train.epochs=2"]) == 0
    assert read_json(run / "run.json")["slides"]
    assert main(["fit", f"--config={run / 'config.yaml'}", f"--out={run}", "--resume=last"]) == 0


@pytest.mark.slow
def test_slides_that_moved_are_found_by_one_option(
    moved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(moved / "runs" / "first")
    absent = tmp_path / "was"
    kept = run.kept()
    common = kept[0].path.parent
    while not all(record.path.is_relative_to(common) for record in kept):
        common = common.parent
    run.splits.write_text(run.splits.read_text().replace(str(common), str(absent)))
    commands = [["test", "--overwrite"], ["heatmap"], ["report"], ["view", f"--static={tmp_path / 'page'}"]]
    before = run.predictions_file("test").read_bytes()
    assert main(["test", str(run.path), "--overwrite"]) == 2
    assert "give --data-root, the folder that now holds what was in" in (error := capsys.readouterr().err)
    assert str(absent) in error
    for name, *more in commands:
        assert main([name, str(run.path), f"--data-root={common}", *more]) == 0
    assert run.predictions_file("test").read_bytes() == before


def test_slides_that_were_replaced_are_refused(
    cohort: Path, moved: Path, external: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(moved / "runs" / "first")
    run.splits.write_text(run.splits.read_text().replace(str(cohort), str(moved)))
    others = [external.parent / name for name, _ in _labels(external)]
    for record, other in zip([one for one in run.kept() if one.split != "train"], others):
        shutil.rmtree(record.path)
        shutil.copytree(other, record.path)
    before = files_of(run.path)
    for command in ("test", "validate", "heatmap"):
        capsys.readouterr()
        assert main([command, str(run.path), *(["--overwrite"] if command == "test" else [])]) == 2
        assert "its checksum has changed" in (error := capsys.readouterr().err) and "--cohort MANIFEST.csv" in error
    assert files_of(run.path) == before


def test_one_slide_under_two_names_is_refused_in_two_splits(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store of the same slide, by whatever name, has the checksum of the slide."""
    shutil.copytree(cohort / "slides", tmp_path / "slides")
    known = rows(cohort / "slides" / "manifest.csv")
    copied = next(row for row in known if row["split"] == "train")
    shutil.copyfile(tmp_path / "slides" / copied["slide"], tmp_path / "slides" / "again.tif")
    lines = [f"{row['slide']},{row['label']},{row['patient']},{row['split']}" for row in known]
    words = ["fit", *VGG, *QUICK, "--train.loggers=[csv]"]
    for split in ("test", "train"):
        manifest = tmp_path / "slides" / f"{split}.csv"
        text = ["slide,label,patient,split", *lines, f"again.tif,{copied['label']},another,{split}"]
        manifest.write_text("\n".join(text) + "\n")
        capsys.readouterr()
        code = main([*words, f"--data.manifest={manifest}", f"--out={tmp_path / split}"])
        said = "".join(capsys.readouterr())
        assert code == (2 if split == "test" else 0)
        assert copied["slide"] in said and "one slide under two names" in said


def test_a_run_from_python(cohort: Path) -> None:
    run = Run.open(cohort / "runs" / "first")
    kept = [record for record in run.kept() if record.split == "test"]
    said = run.predict(kept[0].path)
    row = read_predictions(run.predictions_file("test"))
    assert list(said) == ["probability_0", "probability_1"]
    assert said["probability_1"] == row.probabilities[list(row.slides).index(kept[0].slide), 1]
    assert run.scores["test"]["slides"] == len(kept)
    assert run.encoder is run.loaded.model.backbone
    assert not any(module.training for module in run.loaded.model.modules())


def test_a_run_that_may_only_be_read_predicts_from_python_and_says_nothing(
    moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = moved / "runs" / "first"
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("on_error: stop", "on_error: skip"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    slide = Run.open(folder).kept()[0].path
    loud = logging.getLogger("pytorch_lightning")
    monkeypatch.setattr(loud, "handlers", [logging.StreamHandler()])
    capfd.readouterr()
    with monkeypatch.context() as patch:  # root may write everywhere, so that the mode of the folder would show nothing
        patch.setattr(logging.FileHandler, "_open", forbidden)
        patch.setattr(os, "mkdir", forbidden)
        run = Run.open(folder)
        assert set(run.predict(slide)) == {"probability_0", "probability_1"}
        assert capfd.readouterr() == ("", "")
        (tmp_path / "bad.svs").write_bytes(b"no slide")
        for name in ("bad.svs", "absent.svs"):
            with pytest.raises(SlideError, match=name):
                run.predict(tmp_path / name)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "key", ["budget=null", "budget=64MiB", "budget=1MiB", "precision=64-true", "precision=bf16-mixed"]
)
def test_a_predictor_gives_the_numbers_of_the_commands_with_one_engine_and_no_trainer(
    moved: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = moved / "runs" / "first"
    assert main(["test", str(folder), "--overwrite", f"--train.{key}"]) == 0
    tested = read_predictions(Run(folder).predictions_file("test"))
    monkeypatch.setattr("pytorch_lightning.Trainer.__init__", forbidden)
    plans: list[Plan] = []
    make = Planner.make
    monkeypatch.setattr(Planner, "make", lambda *words: plans.append(make(*words)) or plans[-1])
    run = Run.open(folder, overrides=(f"--train.{key}",))
    for _ in range(2):
        slides = [record for record in run.kept() if record.split == "test"]
        predictions = [run.predictor.predict(record.path) for record in slides]
        assert len(plans) == ("null" not in key), "slides of one size have one plan"
        for prediction, row in zip(predictions, tested.probabilities, strict=True):
            assert prediction.names == ("probability_0", "probability_1")
            assert prediction.values.tolist() == row.tolist()
    assert not run.loaded.model.training and torch.get_default_dtype() == torch.float32


def test_a_predictor_refuses_a_device_and_a_precision_that_are_not_there(cohort: Path) -> None:
    for key, said in (("accelerator=cuda", "there is no such device"), ("precision=8-true", "a prediction needs")):
        if key != "accelerator=cuda" or not torch.cuda.is_available():
            with pytest.raises(UserError, match=said):
                _ = Run.open(cohort / "runs" / "first", overrides=(f"--train.{key}",)).predictor


def forbidden(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_the_model_of_a_checkpoint_is_that_of_its_run(moved: Path, tmp_path: Path) -> None:
    run = Run.open(moved / "runs" / "first", checkpoint="last")
    model = SlideClassifier.load_from_checkpoint(run.checkpoint())
    assert type(model) is SlideClassifier and not model.training
    for name, value in run.loaded.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    with pytest.raises(UserError, match="load it by SlideClassifier"):
        SlideSegmenter.load_from_checkpoint(str(run.checkpoint()))
    shutil.copyfile(run.checkpoint(), tmp_path / "alone.ckpt")
    with pytest.raises(UserError, match=r"alone\.ckpt .* give the network's config"):
        SlideClassifier.load_from_checkpoint(tmp_path / "alone.ckpt")
    again = SlideClassifier.load_from_checkpoint(tmp_path / "alone.ckpt", config=run.loaded.model.config)
    assert torch.equal(again.classifier.weight, model.classifier.weight)
