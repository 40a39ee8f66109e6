"""A run that reads ahead ends with the very weights of one that does not, and stays within its budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json

BUDGET = 6 << 20
SHOWN = ["--data.stain=0.1", "--data.tint=0.02", "--data.shift=40", f"--train.budget={BUDGET}", "--train.epochs=2"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(Run(folder).checkpoint("last"), weights_only=True)["state_dict"]
    return found


def run(words: Sequence[str], folder: Path, ahead: bool) -> None:
    assert main(["fit", *words, f"--out={folder}", f"--data.ahead={str(ahead).lower()}"]) == 0


def assert_same_weights(one: Path, other: Path) -> None:
    expected, actual = weights(one), weights(other)
    assert expected.keys() == actual.keys() and len(expected) > 4
    assert [name for name, value in expected.items() if not torch.equal(value, actual[name])] == []


@pytest.mark.slow
def test_weights_are_the_same_to_the_bit(square_slides: Path, words: list[str], tmp_path: Path) -> None:
    common = [*words, f"--data.manifest={square_slides}", *SHOWN]
    run(common, tmp_path / "without", ahead=False)
    run(common, tmp_path / "with", ahead=True)
    assert_same_weights(tmp_path / "without", tmp_path / "with")
    assert read_json(Run(tmp_path / "with").memory)["step_peak_bytes"] <= BUDGET
