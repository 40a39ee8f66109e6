"""`wsi-train fit --folds N`: each slide is held out once, and the folds are summed up."""

import shutil
from pathlib import Path

import pytest

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.metrics import ClassPredictions, auc


@pytest.fixture
def unsplit(square_slides: Path, tmp_path: Path) -> Path:
    """A manifest without splits."""
    path = tmp_path / "manifest.csv"
    lines = ["slide,label,patient"]
    for index, record in enumerate(read_manifest(square_slides)):
        lines.append(f"{record.path},{record.label},p{index}")
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_folds_are_runs_and_their_summary(
    words: list[str], unsplit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*words, f"--data.manifest={unsplit}", "--train.epochs=1"]
    assert main(["fit", *options, "--folds=2"]) == 0
    shown = capsys.readouterr().out
    assert "cross-validation, 2 folds, by slide" in shown and "2 folds, by patient" in shown and "pooled" in shown
    out = Run(tmp_path / "run")
    facts = Study.open(out.path).scores
    held = [ClassPredictions.read(Run(out.path / f"fold{number}").predictions_file("test")) for number in range(2)]
    everyone = [record.slide for record in read_manifest(unsplit)]
    assert sorted(slide for fold in held for slide in fold.slides) == sorted(everyone)
    for fold, predictions in zip(facts["folds"], held):
        assert fold["slide"]["auc"] == auc(predictions)
    assert facts["patient"]["mean"] == facts["mean"], "each patient has one slide"
    assert facts["pooled"]["auc"]["patients"] > 0 and facts["split"] == "test"

    for _ in range(2):
        assert main(["report", str(out.path)]) == 0
        page = " ".join(out.report.read_text().split())
        assert f"{len(everyone)} slides of {len(everyone)} patients in 2 folds" in page and "mean ± sd" in page
        assert "not defined" not in page
        assert "run, by patient" in page and "fold, by patient" in page and "packages: torch" in page

    study = Study.open(out.path)
    assert study.kind == "folds" and list(study.runs) == ["fold0", "fold1"] and study.split == "test"
    (out.path / "study.json").unlink()  # version 1.0 wrote none
    assert Study.open(out.path) == study
    assert sorted(study.pooled.slides) == sorted(everyone)
    capsys.readouterr()
    assert main(["status", str(out.path)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("done")]
    assert [line.split()[1] for line in shown] == ["fold0,", "fold1,"]

    # A fold that is done is kept; the other is made again.
    shutil.rmtree(out.path / "fold1")
    kept = (out.path / "fold0" / "evaluation" / "test.json").stat().st_mtime_ns
    assert main(["fit", *options, "--folds=2"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["fit", *options, "--folds=2", "--resume=last"]) == 0
    assert Study.open(out.path).scores == facts
    assert (out.path / "fold0" / "evaluation" / "test.json").stat().st_mtime_ns == kept
    assert main(["test", str(out.path / "fold1"), "--overwrite"]) == 0


def test_folds_on_several_devices_are_trained_by_commands_of_their_own(
    words: list[str], unsplit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*words, f"--data.manifest={unsplit}", "--train.devices=2", "--train.budget=1GiB"]
    assert main(["fit", *options, "--folds=2"]) == 2
    said = capsys.readouterr().err
    config = tmp_path / "run" / "folds" / "fold0.yaml"
    assert f"Train fold0 by `wsi-train fit --config {config} --out {tmp_path / 'run' / 'fold0'} --test-on test`" in said
    assert config.is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--folds=1"], "needs 2 or more"),
        (["--folds=9"], "too few for 9 parts"),
        (["--folds=2", "--folds-by=site"], "has no site"),
        (["--folds=2", "--resume=best"], "continues with --resume last"),
    ],
)
def test_what_cannot_be_divided_is_one_line(
    words: list[str], unsplit: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words, f"--data.manifest={unsplit}", *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_folds_are_drawn_once(unsplit: Path, words: list[str], tmp_path: Path) -> None:
    """Also where the manifest has grown."""
    rows = unsplit.read_text().splitlines(keepends=True)
    manifest, folds = unsplit.with_name("some.csv"), tmp_path / "run" / "folds"
    manifest.write_text("".join(rows[:-2]))
    command = ["fit", *words, f"--data.manifest={manifest}", "--train.epochs=1", "--folds=2", "--resume=last"]
    assert main(command) == 0
    kept = [path.read_bytes() for path in sorted(folds.glob("*.csv"))]
    manifest.write_text("".join(rows))
    assert main([*command, "--train.epochs=2"]) == 0
    assert [path.read_bytes() for path in sorted(folds.glob("*.csv"))] == kept
