"""A slide that cannot be read ends the run with one line, or is left out of it exactly and named."""

import csv
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_plugin import Box, LazyImage, SFTStrategy, TileSource
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.callbacks import FailureLog
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.models import ResNet, SlideClassifier
from wsi_trainer.slide.augment import Augmented


@pytest.fixture
def damaged(manifest: Path, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The slides with one of each split spoilt; the path of the manifest, and the name of the spoilt ones."""
    folder = tmp_path / "slides"
    shutil.copytree(manifest.parent, folder)
    records = read_manifest(folder / manifest.name)
    spoilt: dict[str, str] = {}
    for record in records:
        if record.split not in spoilt:
            spoilt[record.split] = record.slide
            record.path.write_bytes(b"II*\0 this is no slide" + record.slide.encode())
    return folder / manifest.name, spoilt


def test_by_default_the_run_ends_and_names_the_slide(
    words: list[str], damaged: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, spoilt = damaged
    assert main(["fit", *words, f"--data.manifest={path}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("wsi-train: error: ") and spoilt["train"] in error


def test_a_slide_that_is_only_tested_on_is_named_before_the_first_step(
    words: list[str], manifest: Path, damaged: tuple[Path, dict[str, str]], tmp_path: Path, capsys: Any
) -> None:
    path, spoilt = damaged
    records = {record.slide: record for record in read_manifest(path)}
    for split in ("train", "val"):
        shutil.copyfile(manifest.parent / spoilt[split], records[spoilt[split]].path)
    assert main(["fit", *words, f"--data.manifest={path}"]) == 2
    assert spoilt["test"] in capsys.readouterr().err
    assert not Run(tmp_path / "run").begun


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["null", "4MiB"])
def test_a_run_goes_on_without_it_and_says_so(
    words: list[str], damaged: tuple[Path, dict[str, str]], tmp_path: Path, budget: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path, spoilt = damaged
    options = [f"--data.manifest={path}", "--data.on_error=skip", "--train.epochs=2", f"--train.budget={budget}"]
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest: a process has none
    assert main(["fit", *words, *options]) == 0
    folder = Run(tmp_path / "run")
    said, listed, log = capsys.readouterr().err, read_json(folder.status)["warnings"], folder.log.read_text()
    for split, times in (("train", 2), ("val", 2), ("test", 1)):
        told = f"slide {spoilt[split]} is left out"
        assert said.count(told) == times and told in log
    assert told in listed[-1]
    with folder.failures.open(newline="") as file:
        rows = [(row["slide"], row["stage"], row["epoch"]) for row in csv.DictReader(file)]
    expected = [
        (spoilt[split], stage, epoch) for epoch in "01" for split, stage in (("train", "train"), ("val", "validate"))
    ]
    assert rows[:4] == expected
    assert rows[4][:2] == (spoilt["test"], "predict") and len(rows) == 5
    scores = read_json(folder.evaluation("test"))
    assert scores["skipped"] == [spoilt["test"]]
    records = [record for record in read_manifest(folder.splits) if record.split == "test"]
    assert scores["slides"] == len(records) - 1


def test_a_run_without_any_slide_ends(words: list[str], damaged: tuple[Path, dict[str, str]], capsys: Any) -> None:
    path, _ = damaged
    for record in read_manifest(path):
        if record.split == "train":
            record.path.write_bytes(record.slide.encode())
    assert main(["fit", *words, f"--data.manifest={path}", "--data.on_error=skip"]) == 2
    assert "none of the 8 training slides can be read" in capsys.readouterr().err


@dataclass
class Failing(TileSource):
    """Pixels that can be read so many times."""

    pixels: Tensor
    reads: int
    dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.pixels.shape)

    def read(self, box: Box) -> Tensor:
        self.reads -= 1
        if self.reads < 0:
            raise ValueError("a decoder gave up")
        return self.pixels[:, :, box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]]

    def constant(self, box: Box) -> None:
        return None


def run(reads: int, tmp_path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Train on three slides, two to a step, the second of which can be read so many times."""
    torch.manual_seed(0)
    model = SlideClassifier(backbone=ResNet(widths=(4, 6)))
    pixels = torch.randint(0, 256, (3, 1, 3, 64, 48), dtype=torch.uint8)
    batches: list[dict[str, Any]] = []
    for index, image in enumerate(pixels):
        source = Augmented(Failing(image, reads if index == 1 else 10**6), name=f"s{index}")
        batches.append(
            {"image": LazyImage(source), "targets": {"label": torch.tensor([index % 2])}, "slide": f"s{index}"}
        )
    log = FailureLog(tmp_path / f"failures-{reads}.csv")
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2, callbacks=[log], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=SFTStrategy(tiles=2),
    )  # fmt: skip
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return model.state_dict(), log.slides


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_that_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    """Whether the slide fails at once, in the forward or in the backward pass: the others train as if it had failed at
    once, gradients that wait for their step and statistics included.
    """
    whole, none = run(10**6, tmp_path)
    at_once, failed = run(0, tmp_path)
    assert (none, failed) == ([], ["s1"])
    assert any(not torch.equal(value, whole[key]) for key, value in at_once.items())
    reads = 0
    while failed and reads < 100:
        reads += 1
        state, failed = run(reads, tmp_path)
        if failed:
            assert all(torch.equal(value, at_once[key]) for key, value in state.items()), reads
    assert reads == 8  # four tiles forward, four backward
    assert all(torch.equal(value, whole[key]) for key, value in state.items())
