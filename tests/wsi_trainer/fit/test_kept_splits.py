"""A run keeps the splits that it drew, whatever its manifest says later."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import read_predictions
from wsi_trainer.synthetic import generate

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of 26 slides without splits."""
    return generate(tmp_path_factory.mktemp("grown"), slides=26, seed=5, shape=(256, 256), workers=1)


def write(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["slide", "path", "label", "patient"], extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


def splits_of(run: Run) -> dict[str, str]:
    with run.splits.open(newline="") as file:
        return {row["slide"]: row["split"] for row in csv.DictReader(file)}


def grown(rows: Rows, more: Rows) -> Rows:
    return [*more, *rows]


def relabelled(rows: Rows, more: Rows) -> Rows:
    return [{**rows[0], "label": "1" if rows[0]["label"] == "0" else "0"}, *rows[1:]]


def shrunk(rows: Rows, more: Rows) -> Rows:
    return rows[:-1]


CHANGES = {
    grown: "6 slides new in the manifest since the run began, left out",
    relabelled: "1 slide with another label in the manifest",
    shrunk: "1 slide no longer in the manifest, kept by the run",
}


@pytest.mark.parametrize("change", CHANGES)
def test_slides_are_scored_in_the_split_they_were_trained_with(
    change: Callable[[Rows, Rows], Rows],
    slides: Path,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with slides.open(newline="") as file:
        rows = [{**row, "path": str(slides.parent / row["slide"])} for row in csv.DictReader(file)]
    manifest, run = tmp_path / "manifest.csv", Run(tmp_path / "run")
    write(manifest, rows[:20])
    fit = ["fit", *words, f"--data.manifest={manifest}", "--train.epochs=1"]
    assert main(fit) == 0
    kept = run.splits.read_bytes()
    splits = splits_of(run)
    write(manifest, change(rows[:20], rows[20:]))
    for command, split in ((["test", str(run.path), "--overwrite"], "test"), (["validate", str(run.path)], "val")):
        capsys.readouterr()
        assert main(command) == 0
        assert CHANGES[change] in " ".join(capsys.readouterr().out.split())
        said = read_predictions(run.predictions(split)).slides
        assert set(said) == {slide for slide, its in splits.items() if its == split}
    assert main([*fit, "--train.epochs=2", "--resume=last"]) == 0
    assert set(read_predictions(run.predictions("test")).slides) == {s for s, its in splits.items() if its == "test"}
    assert run.splits.read_bytes() == kept


def test_folds_are_drawn_once(slides: Path, words: list[str], tmp_path: Path) -> None:
    with slides.open(newline="") as file:
        rows = [{**row, "path": str(slides.parent / row["slide"])} for row in csv.DictReader(file)]
    manifest, folds = tmp_path / "manifest.csv", tmp_path / "run" / "folds"
    write(manifest, rows[:20])
    command = ["fit", *words, f"--data.manifest={manifest}", "--train.epochs=1", "--folds=2", "--resume=last"]
    assert main(command) == 0
    kept = [path.read_bytes() for path in sorted(folds.glob("*.csv"))]
    write(manifest, rows)
    assert main([*command, "--train.epochs=2"]) == 0
    assert [path.read_bytes() for path in sorted(folds.glob("*.csv"))] == kept
