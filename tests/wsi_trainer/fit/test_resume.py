"""A run that dies and is continued ends with the weights of one that did not."""

import errno
import os
import resource
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

from tests.warm import start
from tests.wsi_trainer.fit import slow_steps
from wsi_trainer.cli import FAULT_EXIT, main
from wsi_trainer.fit import fit, trainer
from wsi_trainer.fit.folder import read_curves
from wsi_trainer.fit.run import Run
from wsi_trainer.io import files
from wsi_trainer.io.files import read_json
from wsi_trainer.models import SlideClassifier


class Killed(RuntimeError):
    """Stands for the end of the process."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(Run(folder).checkpoint("last"), weights_only=True)["state_dict"]


@pytest.mark.slow
def test_resumed_after_death_in_an_epoch(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["fit", *words]) == 0
    for epoch in (1, 2):
        folder = tmp_path / f"killed-{epoch}"
        die_and_resume([*words, f"--out={folder}"], epoch, monkeypatch)
        expected, actual = weights(tmp_path / "run"), weights(folder)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(value, actual[key]) for key, value in expected.items())
        curves = [read_curves(Run(place).metrics) for place in (tmp_path / "run", folder)]
        assert curves[0] == curves[1]


def die_and_resume(words: list[str], epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies in an epoch, and goes on."""

    def die(self: SlideClassifier, batch: object, batch_idx: int) -> None:
        if self.current_epoch == epoch and batch_idx == 3:
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(SlideClassifier, "on_train_batch_start", die)
        assert main(["fit", *words]) == FAULT_EXIT
    assert main(["fit", *words, "--resume=last"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "died"),
    [
        ("8MiB", "after its test"),
        ("null", "before its test"),
        ("8MiB", "while it wrote a checkpoint"),
    ],
)
def test_the_same_command_again_ends_a_run_that_is_finished(
    words: list[str], square_slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, died: str
) -> None:
    """As docs/how-to/slurm.md has it: one script for the first job and for all others."""
    options = [f"--data.manifest={square_slides}", "--train.epochs=1", f"--train.budget={budget}"]
    command = ["fit", *words, *options, "--resume=last"]
    folder = Run(tmp_path / "run")

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as context:
        if died == "before its test":
            context.setattr(fit, "test_split", die)
        elif died == "while it wrote a checkpoint":
            context.setattr(os, "fsync", die)
        assert main(command) == (0 if died == "after its test" else FAULT_EXIT)
    memory = folder.memory.read_bytes() if folder.memory.is_file() else b""
    assert bool(memory) == (died != "while it wrote a checkpoint")
    assert main(command) == 0
    assert folder.evaluation("test").is_file() and folder.predictions_file("test").is_file()
    assert not memory or folder.memory.read_bytes() == memory
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_a_folder_is_one_runs_at_a_time(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the first has taken a step already or not."""
    monkeypatch.setattr(files, "PATIENCE", 0.05)
    folder = Run(tmp_path / "run")
    folder.path.mkdir()
    with folder.locked():
        for more in ([], ["--resume=last"]):
            assert main(["fit", *words, *more]) == 2
            assert "is being written by another run" in capsys.readouterr().err
    assert [path.name for path in folder.path.iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_model_it_began_with(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint holds the optimizer with its learning rate: what is asked for otherwise could only be ignored."""
    command = ["fit", *words, "--resume=last"]
    assert main([*command, "--train.epochs=1"]) == 0
    folder = Run(tmp_path / "run")
    config = folder.config.read_text()
    assert main([*command, "--train.epochs=2", "--model.learning_rate=0.5"]) == 2
    assert "model.learning_rate was" in capsys.readouterr().err and folder.config.read_text() == config
    assert main([*command, "--train.epochs=2"]) == 0
    assert "train.epochs was 1 and is 2 from now on" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["null", "8MiB"])
def test_a_run_that_died_after_its_last_checkpoint_tells_of_its_memory(
    budget: str, words: list[str], tmp_path: Path
) -> None:
    command = ["fit", *words, "--train.epochs=1", f"--train.budget={budget}"]
    assert main(command) == 0
    folder = Run(tmp_path / "run")
    before = read_json(folder.memory)
    folder.memory.unlink()
    folder.plan.unlink(missing_ok=True)
    assert main([*command, "--resume=last"]) == 0
    after = read_json(folder.memory)
    assert after.pop("process_peak_bytes") and before.pop("process_peak_bytes")
    assert after == before
    assert folder.plan.is_file() == (budget != "null")


def test_a_full_disk_keeps_the_checkpoint_before(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", *words, "--train.epochs=2", "--train.checkpoint_every=1", "--resume=last"]
    folder, fsync, calls = Run(tmp_path / "run"), os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}")
        if calls > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        assert main(command) == 2
    error = capsys.readouterr().err
    assert f"{folder.checkpoint_path('last')} cannot be written" in error
    assert "No space left on device; the checkpoint before it is kept" in error
    assert "Traceback" not in error and error.count("\n") == 1
    assert [path.name for path in folder.checkpoints.iterdir()] == ["last.ckpt"]
    assert weights(folder.path)
    assert main(command) == 0


def write_large(path: Path) -> None:
    """Print by how many bytes the process grows while it writes 400 MB."""
    state = {f"w{i}": torch.ones(5_000_000) for i in range(20)}
    trainer.Checkpoints().save_checkpoint({"w": torch.ones(3)}, path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.Checkpoints().save_checkpoint({"state_dict": state, "again": state}, path)
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


@pytest.mark.slow
def test_a_checkpoint_is_written_without_a_second_copy_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    start(tmp_path / "log", write_large, path).join()
    assert int((tmp_path / "log").read_text()) < 60_000_000 < 400_000_000 < path.stat().st_size


def terminated(process: ForkServerProcess, log: Path) -> str:
    """What a process wrote that was sent SIGTERM and ended of it."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 143, log.read_text()[-3000:]
    return log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signals")
def test_a_signal_ends_a_run_which_is_continued(words: list[str], tmp_path: Path) -> None:
    """Not as if all were well: a job that is stopped has another exit code than one that is done."""
    command = ["fit", *words, "--train.epochs=2", "--train.checkpoint_every=1", "--resume=last"]
    process = start(tmp_path / "log.txt", slow_steps.fit, command)
    last = Run(tmp_path / "run").checkpoint_path("last")
    while not last.is_file() and process.is_alive():
        time.sleep(0.05)
    error = terminated(process, tmp_path / "log.txt")
    assert error.splitlines()[-1] == "wsi-train: ended by SIGTERM" and "Traceback" not in error
    assert weights(tmp_path / "run")
    assert main(command) == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signals")
def test_a_signal_ends_a_command_that_looks_at_slides(words: list[str], tmp_path: Path) -> None:
    assert main(["fit", *words, "--train.epochs=1"]) == 0
    manifest = next(w.partition("=")[2] for w in words if w.startswith("--data.manifest="))
    command = ["predict", str(tmp_path / "run"), "--overwrite", manifest]
    log = tmp_path / "log.txt"
    process = start(log, slow_steps.look, command)
    while not log.is_file() or "looking at a slide" not in log.read_text():
        assert process.is_alive(), "it ended before it began"
        time.sleep(0.05)
    error = terminated(process, log)
    assert error.splitlines()[-1] == "wsi-train: ended by SIGTERM" and "Traceback" not in error


def test_a_disk_without_locks_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.FileLock, "acquire", refuse)
    with Run(tmp_path).locked():
        pass
