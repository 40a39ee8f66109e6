"""The demo on few small slides, through the command line."""

from pathlib import Path

import pytest

from wsi_trainer.cli import main
from wsi_trainer.fit.config import make_parser, parse
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo that is too small to learn anything, but runs every stage."""
    out = tmp_path_factory.mktemp("demo") / "Ü: out #1"
    assert main(words(out)) == 0
    return out


def words(out: Path) -> list[str]:
    return ["demo", f"--out={out}", "--slides=20", "--side=256", "--epochs=1", "--seed=3"]


def test_leaves_slides_stores_runs_and_report(small_demo: Path) -> None:
    assert len(list((small_demo / "slides" / "slides").glob("*.tif"))) == 20
    assert len(list((small_demo / "zarr").glob("*.zarr"))) == 20
    for name in ("full", "thumbnail"):
        run = Run(small_demo / "runs" / name).existing()
        assert read_json(run.evaluation("test"))["slides"] >= 6
        assert parse(make_parser("fit", ""), [f"--config={run.path}.yaml"]).out == run.path
    page = (small_demo / "report.html").read_text(encoding="utf-8")
    assert "Difference, paired by slide" in page and "thumbnail" in page


@pytest.mark.slow
def test_a_rerun_keeps_the_slides_and_ends_with_path_and_numbers(
    small_demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slides = sorted((small_demo / "slides" / "slides").glob("*.tif"))
    before = [path.stat().st_mtime_ns for path in slides]
    first = Run(small_demo / "runs" / "full").predictions_file("test").read_bytes()
    assert main(words(small_demo)) == 0
    assert [path.stat().st_mtime_ns for path in slides] == before
    assert Run(small_demo / "runs" / "full").predictions_file("test").read_bytes() == first
    out = capsys.readouterr().out
    assert f"report: {small_demo / 'report.html'}" in out
    for line in ("full resolution", "thumbnail", "difference, paired", "what plain PyTorch holds"):
        assert line in out


@pytest.mark.parametrize(
    ("option", "message"),
    [("--slides=5", "at least 20"), ("--side=100", "at least 256"), ("--epochs=0", "at least 1")],
)
def test_numbers_too_small_are_refused(
    tmp_path: Path, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", f"--out={tmp_path / 'out'}", option]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["demo", f"--out={tmp_path}"]) == 2
    assert "not an earlier demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
