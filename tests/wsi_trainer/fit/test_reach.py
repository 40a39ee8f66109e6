"""What strangers send executes nothing: checkpoints, weights and configs, in every command."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run


class Evil:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A file that is there only if somebody's code was executed."""
    return tmp_path / "executed"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error and "weights_only" not in error
    return error


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, manifest: Path) -> Path:
    """The folder of a run of one epoch, tile by tile, with dropout and early stopping: all that a checkpoint holds."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = [
        f"--out={folder}", f"--data.manifest={manifest}", "--model.backbone=wsi_trainer.models.VGG",
        "--model.backbone.widths=[4,8]", "--model.backbone.convs=1", "--model.dropout=0.2", "--train.epochs=1",
        "--train.accelerator=cpu", "--train.budget=8MiB", "--train.resamples=10", "--train.patience=2",
        "--train.checkpoint_every=1",
    ]  # fmt: skip
    assert main(["fit", *words]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", ["test", "validate", "predict", "heatmap", "fit"])
def test_a_checkpoint_executes_nothing(
    command: str, trained: Path, manifest: Path, trap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(Run(trained).checkpoint("best"), weights_only=True)
    torch.save({**content, "callbacks": Evil(trap)}, tmp_path / "evil.ckpt")
    words = [str(trained), *([str(manifest)] if command == "predict" else [])]
    words += [f"--resume={tmp_path / 'evil.ckpt'}" if command == "fit" else f"--checkpoint={tmp_path / 'evil.ckpt'}"]
    words += ["--overwrite"] if command == "test" else []
    capsys.readouterr()
    assert main([command, *words]) == 2
    assert "which reading it would run" in one_line(capsys)
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "pickle", "legacy", "list", "folder", "absent", "null"])
def test_a_file_that_is_no_checkpoint_is_one_line(
    kind: str, trained: Path, trap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.ckpt"
    whole = Run(trained).checkpoint("best").read_bytes()
    contents = {"empty": b"", "text": b"weights\n", "cut": whole[: len(whole) // 2], "pickle": pickle.dumps(Evil(trap))}
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "legacy":
        torch.save(Evil(trap), path, _use_new_zipfile_serialization=False)
    elif kind == "list":
        torch.save([torch.ones(2)], path)
    elif kind == "folder":
        path.mkdir()
    path = Path("/dev/null") if kind == "null" else path
    assert main(["test", str(trained), "--overwrite", f"--checkpoint={path}"]) == 2
    assert path.name in one_line(capsys)
    if kind in ("cut", "pickle"):
        config = f"--config={trained / 'config.yaml'}"
        for more in (
            [str(trained), f"--resume={path}"],
            [config, f"--out={tmp_path / 'r'}", f"--model.pretrained={path}"],
        ):
            assert main(["fit", *more]) == 2
            assert path.name in one_line(capsys)
    assert not trap.exists()


CONFIGS = [
    "model: {head: {class_path: os.system, init_args: {command: 'touch TRAP'}}}",
    "model: {head: os.system}",
    "model: {head: {class_path: wsi_trainer.models.heads.torch.hub.load}}",
    "model: {backbone: {class_path: subprocess.Popen, init_args: {args: [touch, TRAP]}}}",
    "model: {backbone: torch.nn.Identity}",
    "model: {backbone: os.getcwd}",
    "model: {task: {class_path: os.system, init_args: {command: 'touch TRAP'}}}",
    "model: {head: {class_path: wsi_trainer.cli.main}}",
    "model: {head: {class_path: functools.partial, init_args: {func: os.system}}}",
    "model.head: {class_path: os.system}",
    "model: {backbone: evil.Net}",
]


OF_RUNS = ("test", "validate", "predict", "heatmap", "export")
COMMANDS = [
    *(("fit", text, False) for text in CONFIGS),
    ("plan", CONFIGS[0], False),
    *((name, CONFIGS[0], checkpoint) for name in OF_RUNS for checkpoint in (False, True)),
]


@pytest.mark.parametrize(("command", "text", "checkpoint"), COMMANDS)
def test_a_config_names_classes_of_this_package_only(
    command: str, text: str, checkpoint: bool, trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "evil.py").write_text(f"open({str(trap)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m wsi_trainer` has the working folder
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    config.write_text("data: {manifest: m.csv}\n" + text.replace("TRAP", str(trap)) + "\n")
    if checkpoint:
        (config.parent / "checkpoints").mkdir()
        torch.save(Evil(trap), config.parent / "checkpoints" / "best.ckpt")
    of_config = [f"--config={config}", f"--out={config.parent}"]
    needed = {"plan": [*of_config, "--budget=1GiB", "--image=512x512"], "fit": of_config}
    of_run = {"predict": ["m.csv"], "export": [f"--out={tmp_path / 'model'}"]}
    more = needed.get(command, [str(config.parent), *of_run.get(command, [])])
    assert main([command, *more]) == 2
    error = one_line(capsys)
    assert "--trust" in error and "is not a class of wsi_trainer.models" in error
    assert not trap.exists()


def test_a_config_cannot_trust_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"out: {tmp_path / 'run'}\ndata: {{manifest: m.csv}}\ntrust: true\n")
    assert main(["fit", f"--config={config}"]) == 2
    assert "unknown key 'trust'" in one_line(capsys)


def test_with_trust_your_own_classes_are_used_in_every_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom wsi_trainer.models import MaxPooling\n\n"
        "class Head(MaxPooling):\n    '''Mine.'''\n\n"
        "class Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Conv2d(3, 4, 3, 4), nn.ReLU())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = [word for word in words if "backbone" not in word] + ["--model.backbone=mine.Net", "--model.head=mine.Head"]
    assert main(["fit", *own, "--train.epochs=1"]) == 2
    assert "mine.Head is not a class" in one_line(capsys)
    assert main(["fit", "--trust", *own, "--train.epochs=1"]) == 0
    again = ["test", str(tmp_path / "run"), "--overwrite"]
    capsys.readouterr()
    assert main(again) == 2
    assert "--trust" in one_line(capsys)
    with pytest.raises(UserError, match="--trust"):
        _ = Run.open(tmp_path / "run").loaded
    assert Run.open(tmp_path / "run", trust=True).loaded.data.manifest.is_absolute()
    assert main([*again, "--trust"]) == 0


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{p}'] * 10)}]\n" for p, c in zip("abcdefgh", "bcdefghi")
)
TEXTS = [
    (BOMB.encode(), "stands for more than"),
    (b"a: &a [*a]\n", "a part of itself"),
    (b"train: {epochs: 3}\ntrain: {epochs: 4}\n", "the key 'train' is there twice, in line 2"),
    (b"train:\n  epochs: 3\n  seed: 1\n  epochs: 4\n", "the key 'epochs' is there twice, in line 4"),
    (bytes(range(256)), "no text in UTF-8"),
    (b"[" * 100_000, "nested"),
    (b"train: {budget: 128 bananas}\n", "'128 bananas' is not a size"),
    (b"train: {budget: 1e999GiB}\n", "train.budget"),
    (b"train: {budget: 1.2.3GiB}\n", "train.budget"),
]


@pytest.mark.parametrize(("data", "message"), TEXTS, ids=[message[:20] for _, message in TEXTS])
def test_a_config_that_is_no_config_is_one_line(
    data: bytes, message: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_bytes(data)
    own = [word for word in words if "budget" not in word]
    assert main(["fit", *own, f"--config={config}"]) == 2
    error = one_line(capsys)
    assert message in error and len(error) < 1000
    if b"train" not in data:
        assert main(["verify", f"--config={config}", str(tmp_path)]) == 2
        assert message in one_line(capsys)


def test_an_output_that_cannot_show_a_letter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wsi_trainer", "verify", str(tmp_path / "µ×ü")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
