"""A run that reads ahead ends with the very weights of one that does not, and stays within its budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lightning_plugin import Box
from wsi_trainer.cli import main
from wsi_trainer.fit.callbacks import ReadAhead
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.slide.views import View

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


def test_weights_are_the_same_to_the_bit(
    square_slides: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*words, f"--data.manifest={square_slides}", *SHOWN]
    run(common, tmp_path / "without", ahead=False)
    begun: list[int] = []
    rooms: list[int] = []
    used: list[bool] = []
    begin, read, room = View.begin, View.read, ReadAhead._room

    def counting(self: View, like: Box, most: int) -> int:
        if size := begin(self, like, most):
            begun.append(size)
        return size

    def looking(self: View, box: Box) -> torch.Tensor:
        if self.first is None and self._begun is not None:
            used.append(self._begun == box)
        return read(self, box)

    def noting(self: ReadAhead, strategy: object) -> int:
        rooms.append(room(self, strategy))
        return rooms[-1]

    monkeypatch.setattr(View, "begin", counting)
    monkeypatch.setattr(View, "read", looking)
    monkeypatch.setattr(ReadAhead, "_room", noting)
    run(common, tmp_path / "with", ahead=True)
    assert_same_weights(tmp_path / "without", tmp_path / "with")
    assert rooms[0] == 0  # of the first step it is not known what it holds beside its plan
    assert len(begun) >= 6 and sum(used) >= 6, (rooms, begun, used)
    facts = read_json(Run(tmp_path / "with").memory)
    assert facts["step_peak_bytes"] + max(begun) <= BUDGET
