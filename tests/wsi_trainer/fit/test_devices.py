"""Several devices: each has slides of its own, and one of them writes."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from wsi_trainer.cli import main
from wsi_trainer.data.datamodule import EpochSampler, InOrder
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.models.slide_model import Gathered

PROGRAM = "import sys; from wsi_trainer.cli import main; sys.exit(main(sys.argv[1:]))"


def test_ranks_share_the_slides_and_none_runs_out_before_the_others() -> None:
    for slides in (1, 5, 6):
        shares = [[visit.slide for visit in EpochSampler(slides, 3, rank, 2)] for rank in range(2)]
        assert len(shares[0]) == len(shares[1]) == len(EpochSampler(slides, 3, 0, 2))
        assert set(shares[0]) | set(shares[1]) == set(range(slides))
        looked_at = [visit.slide for rank in range(2) for visit in InOrder(slides, rank, 2)]
        assert sorted(looked_at) == list(range(slides))


def test_what_was_gathered_of_one_slide_stays_a_row() -> None:
    gathered = Gathered()
    assert [len(values) for values in gathered.rows()] == [0, 0]
    gathered.update(torch.tensor([1]), torch.tensor([[0.25]]))
    targets, predicted = gathered.rows()
    assert targets.tolist() == [1] and predicted.tolist() == [[0.25]]


@pytest.mark.full
def test_two_processes_train_one_network(words: list[str], square_slides: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = [f"--data.manifest={square_slides}", "--train.budget=64MiB", "--train.devices=2", "--train.epochs=2"]
    done = subprocess.run(
        [sys.executable, str(program), "fit", *words, *options],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Run(tmp_path / "run")
    assert read_json(folder.evaluation("test"))["slides"] == 2
    assert torch.load(folder.checkpoint("last"), weights_only=False)["global_step"] == 2 * 3  # of 6 slides, two at once


NOTING = """
import os, sys
from wsi_trainer.cli import main
from wsi_trainer.models import SlideClassifier
step = SlideClassifier.training_step
def noted(self, batch, batch_idx):
    loss = step(self, batch, batch_idx)
    with open(f"losses-{os.environ.get('LOCAL_RANK', 0)}", "a") as file:
        print(float(loss.detach()), file=file)
    return loss
SlideClassifier.training_step = noted
sys.exit(main(sys.argv[1:]))
"""


def test_the_loss_of_an_epoch_is_the_mean_over_all_devices(
    words: list[str], square_slides: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(NOTING)
    options = [f"--data.manifest={square_slides}", "--train.budget=64MiB", "--train.devices=2", "--train.epochs=2"]
    command = [sys.executable, "program.py", "fit", *words, *options, "--train.loggers=[csv]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = np.array([np.loadtxt(tmp_path / f"losses-{rank}") for rank in range(2)])
    (table,) = (tmp_path / "run").rglob("metrics.csv")
    with table.open() as file:
        said = [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]
    assert said == pytest.approx(steps.reshape(2, 2, 3).mean(axis=(0, 2)).tolist(), rel=1e-6)


@pytest.mark.full
def test_folds_on_two_processes_are_runs_of_their_own(words: list[str], square_slides: Path, tmp_path: Path) -> None:
    options = [f"--data.manifest={square_slides}", "--train.budget=64MiB", "--train.devices=2", "--train.epochs=1"]
    command = [sys.executable, "-m", "wsi_trainer", "fit", *words, *options, "--folds=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).resolve().parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    out = Run(tmp_path / "run")
    facts = read_json(out.cross_validation)
    assert facts["split"] == "val" and len(facts["folds"]) == 2  # the manifest's test slides are kept for the end
    for number in range(2):
        fold = Run(out.path / f"fold{number}")
        assert read_json(fold.evaluation("val"))["slides"] == facts["folds"][number]["slides"]
        assert torch.load(fold.checkpoint("last"), weights_only=False)["global_step"] == 3


@pytest.mark.full
def test_a_fold_that_fails_says_how_to_go_on(
    words: list[str], square_slides: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [f"--data.manifest={square_slides}", "--train.budget=1KiB", "--train.devices=2", "--train.epochs=1"]
    assert main(["fit", *words, *options, "--folds=2"]) == 2
    error = capfd.readouterr().err
    assert "smallest budget that works is" in error
    assert "ended with exit code 2, its message is above; mend it and continue with --resume last" in error
