"""Several devices: each has slides of its own, and one of them writes."""

import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.warm import start
from wsi_trainer.cli import main
from wsi_trainer.data.datamodule import EpochSampler, InOrder
from wsi_trainer.data.dataset import SlideBatch
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.models import SlideClassifier


def test_ranks_share_the_slides_and_none_runs_out_before_the_others() -> None:
    for slides in (1, 5, 6):
        shares = [[visit.slide for visit in EpochSampler(slides, 3, rank, 2)] for rank in range(2)]
        assert len(shares[0]) == len(shares[1]) == len(EpochSampler(slides, 3, 0, 2))
        assert set(shares[0]) | set(shares[1]) == set(range(slides))
        looked_at = [visit.slide for rank in range(2) for visit in InOrder(slides, rank, 2)]
        assert sorted(looked_at) == list(range(slides))


PROGRAM = """
import sys
from tests.wsi_trainer.fit.test_devices import train
train(sys.argv[1:])
"""


def train(words: Sequence[str]) -> NoReturn:
    """`wsi-train` in each of several processes, which write the loss of each step into the working folder."""
    step = SlideClassifier.training_step

    def noted(self: SlideClassifier, batch: SlideBatch, batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx)
        with open(f"losses-{os.environ.get('LOCAL_RANK', 0)}", "a") as file:
            print(float(loss.detach()), file=file)
        return loss

    SlideClassifier.training_step = noted  # type: ignore[method-assign]
    sys.exit(main(words))


def first_process(program: Path, words: Sequence[str]) -> NoReturn:
    """What `python PROGRAM WORDS` does: the processes that it starts are given the same command."""
    os.chdir(program.parent)
    sys.argv = [str(program), *words]
    train(words)


@pytest.mark.slow
def test_two_processes_train_one_network(words: list[str], square_slides: Path, tmp_path: Path) -> None:
    """The loss of an epoch is the mean over both."""
    (tmp_path / "program.py").write_text(PROGRAM)
    options = [f"--data.manifest={square_slides}", "--train.budget=64MiB", "--train.devices=2", "--train.epochs=2"]
    command = ["fit", *words, *options, "--train.loggers=[csv]"]
    process = start(tmp_path / "log", first_process, tmp_path / "program.py", command)
    process.join(300)
    assert process.exitcode == 0, (tmp_path / "log").read_text()[-3000:]
    steps = np.array([np.loadtxt(tmp_path / f"losses-{rank}") for rank in range(2)])
    (table,) = (tmp_path / "run").rglob("metrics.csv")
    with table.open() as file:
        said = [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]
    assert said == pytest.approx(steps.reshape(2, 2, 3).mean(axis=(0, 2)).tolist(), rel=1e-6)
    folder = Run(tmp_path / "run")
    assert read_json(folder.evaluation("test"))["slides"] == 2
    assert torch.load(folder.checkpoint("last"), weights_only=False)["global_step"] == 2 * 3  # of 6 slides, two at once
