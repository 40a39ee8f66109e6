"""Splits in which all slides are of one class: a mistake of the table that scores hide."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from wsi_trainer.cli import main


def with_labels(manifest: Path, target: Path, label: Callable[[str, int], str]) -> Path:
    """The manifest with other labels, by split and row."""
    with manifest.open() as file:
        rows = list(csv.DictReader(file))
    for index, row in enumerate(rows):
        row["label"] = label(row["split"], index)
        row["slide"] = str(manifest.parent / row["slide"])
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return target


def one_to_train(split: str, row: int) -> str:
    return "1" if split == "train" else str(row % 2)


def one_to_test(split: str, row: int) -> str:
    return str(row % 2) if split == "train" else "0"


def test_a_split_of_one_class_is_refused_or_named(
    words: list[str], square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = with_labels(square_slides, tmp_path / "only.csv", one_to_train)
    assert main(["fit", *words, f"--data.manifest={only}"]) == 2
    assert "the split train has slides of the class '1' only: nothing can be learnt" in capsys.readouterr().err
    held = with_labels(square_slides, tmp_path / "held.csv", one_to_test)
    assert main(["fit", *words, f"--data.manifest={held}", "--train.epochs=1"]) == 0
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "the split test has slides of the class '0' only" in text
    shown = " ".join(capsys.readouterr().out.split())
    assert "auc not defined" in shown and "(no interval: 2 patients, of 10 needed)" in shown
