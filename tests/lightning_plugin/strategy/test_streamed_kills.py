"""A run whose parameters live on the disk, killed at random moments, ends as if it had not been."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from tests.lightning_plugin.strategy.test_updates import Bags, Module, tight, trainer
from tests.lightning_plugin.test_streamed import Encoder
from tests.warm import start

EPOCHS = 8


class Begun(Callback):
    """Says that training has begun."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, *_: Any) -> None:
        self.file.touch()


def train(folder: Path) -> None:
    """A run that goes on where one before it was killed; each epoch is one step, and its end a checkpoint."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    net = Encoder(2).double()
    module = Module(net, "AdamW", lr=1e-3)
    strategy = tight(net, "disk")
    last = folder / "last.ckpt"
    callbacks = [ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_epochs=1), Begun(folder / "begun")]
    run = trainer(strategy, max_epochs=EPOCHS, enable_checkpointing=True, callbacks=callbacks)
    data = DataLoader(Subset(Bags(), [0]), batch_size=None)
    run.fit(module, data, ckpt_path=last if last.is_file() else None, weights_only=False)
    if (folder / "begun").exists():  # else the run before was killed after its last checkpoint
        assert strategy.plan is not None and strategy.plan.on_disk
    torch.save(module.state_dict(), folder / "partial")
    (folder / "partial").rename(folder / "done")


def begun(folder: Path, environment: dict[str, str]) -> Any:
    """A process that trains, once it does."""
    (folder / "begun").unlink(missing_ok=True)
    process = start(folder / "log.txt", train, folder, environment=environment)
    while process.is_alive() and not (folder / "begun").exists():
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_killed_and_continued(
    tmp_path: Path, count: Callable[..., int], record_result: Callable[[str, dict[str, Any]], None]
) -> None:
    wanted, draw = count(ci=2, full=50), random.Random(1)
    environment = {"LIGHTNING_PLUGIN_CACHE": str(tmp_path / "cache")}
    whole = tmp_path / "whole"
    whole.mkdir()
    process = begun(whole, environment)
    began = time.monotonic()
    process.join(300)
    took = time.monotonic() - began
    assert (whole / "done").is_file(), (whole / "log.txt").read_text()[-2000:]
    expected = torch.load(whole / "done")
    kills = runs = 0
    while kills < wanted:
        folder = tmp_path / f"run {runs}"
        folder.mkdir()
        runs += 1
        while not (folder / "done").is_file():
            process = begun(folder, environment)
            process.join(draw.uniform(0, 0.7 * took) if kills < wanted else 300)
            if process.is_alive():
                kills += 1
            process.kill()
            process.join()
            assert process.exitcode in (0, -9), (folder / "log.txt").read_text()[-2000:]
        found = torch.load(folder / "done")
        assert all(torch.equal(found[name], expected[name]) for name in expected), f"run {runs} ends elsewhere"
    record_result("streamed_kills", {"kills": kills, "runs": runs, "epochs": EPOCHS, "identical": runs})
