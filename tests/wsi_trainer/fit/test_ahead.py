"""A run that reads ahead ends with the very weights of one that does not, and stays within its budget."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import tifffile
import torch

from lightning_plugin import Box
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
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


def test_a_tile_that_cannot_be_decoded_is_left_out_in_its_own_step(
    square_slides: Path, words: list[str], tmp_path: Path
) -> None:
    """The slide opens, and its pixels are damaged: read ahead or not, the same step is left out, and no other."""
    folder = tmp_path / "slides"
    shutil.copytree(square_slides.parent, folder)
    spoilt = [record for record in read_manifest(folder / square_slides.name) if record.split == "train"][2]
    with tifffile.TiffFile(spoilt.path) as tif:
        spans = list(zip(tif.pages[0].dataoffsets, tif.pages[0].databytecounts))  # type: ignore[union-attr]
    with spoilt.path.open("r+b") as file:
        for start, size in spans:
            file.seek(start)
            file.write(b"\0" * size)
    common = [*words, f"--data.manifest={folder / square_slides.name}", *SHOWN, "--data.on_error=skip"]
    for name, switch in (("without", False), ("with", True)):
        run(common, tmp_path / name, ahead=switch)
    assert_same_weights(tmp_path / "without", tmp_path / "with")
    failures = [Run(tmp_path / name).failures.read_text() for name in ("without", "with")]
    assert failures[0] == failures[1]
    assert failures[0].count(f"{spoilt.slide},train") == 2
