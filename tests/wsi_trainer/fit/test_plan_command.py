"""`wsi-train plan`: configs and named models plan for an image that is not there."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_plugin import Plan
from tests.wsi_trainer.small import VGG
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.data.splits import folds
from wsi_trainer.fit.plan import build_model
from wsi_trainer.io.display import duration

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo.yaml"
HERE = "tests.wsi_trainer.fit.test_plan_command"


def of_config(image: str, *more: str) -> list[str]:
    return ["plan", f"--config={DEMO}", f"--image={image}", *more]


def of_model(name: str, *more: str) -> list[str]:
    return ["plan", "--model", name, "--image", "4096x2048", "--budget", "64MiB", *more]


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))


class ReadsItsBuffer(nn.Module):
    """A network that needs the value of a buffer, which a meta tensor does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.net = small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * float(self.scale))


def needs_width(width: int) -> nn.Module:
    return nn.Conv2d(3, width, 1)


def not_a_module() -> str:
    return "VGG"


def test_plans_a_slide_that_no_memory_here_would_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main(of_config("50000x40000", "--budget=2GiB", f"--json={json}", f"--picture={picture}")) == 0
    assert "1 x 3 x 40000 x 50000 within 2.0 GiB" in capsys.readouterr().out
    plan = Plan.from_json(json.read_text())
    assert 0 < plan.peak_bytes <= 2 * 2**30 < 80 * 2**30 < plan.plain_bytes
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_all_folds_of_a_manifest_cost(
    square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slides of one size take one time each: a third of it where they are only predicted."""
    epochs, json = 100_000, tmp_path / "plan.json"
    config = ["plan", *VGG, f"--data.manifest={square_slides}", "--train.accumulate=2", f"--train.epochs={epochs}"]
    assert main([*config, "--folds=2", "--budget=2MiB", f"--json={json}"]) == 0
    said = capsys.readouterr().out
    runs = folds(read_manifest(square_slides), 2)
    seconds, steps = 0.0, 0
    for run in runs:
        train, val, test = (sum(one.split == split for one in run) for split in ("train", "val", "test"))
        seconds += Plan.from_json(json.read_text()).seconds * (epochs * (train + val / 3) + test / 3)
        steps += epochs * -(-train // 2)
    assert f"12 slides, {12 * 256 * 256 / 1e9:.3g} Gpx × {epochs} epochs × 2 folds" in said
    assert f"time    {duration(seconds)}, {duration(seconds / 2)} a run, {steps} steps" in said
    changes = said.split("what to change first:\n")[1].splitlines()
    assert changes[0].strip().startswith(f"{duration(seconds / 4)} with pixels twice as large")
    assert f"{duration(seconds / 2)} with train.epochs {epochs // 2}" in " ".join(said.split())
    assert main([*config, "--folds=2", "--budget=2MiB", "--image=512x512"]) == 2
    assert "--folds is about all slides of data.manifest" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vgg", f"{HERE}:small", f"{HERE}:ReadsItsBuffer"])
def test_models_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(of_model(name)) == 0
    assert "1 x 3 x 2048 x 4096 within 64.0 MiB" in capsys.readouterr().out


def test_a_module_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_of_mine.py").write_text("from torch import nn\ndef build():\n    return nn.Conv2d(3, 2, 1)\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert isinstance(build_model("nets_of_mine:build")(), nn.Conv2d)
    assert sys.path == path
    sys.modules.pop("nets_of_mine")


def test_models_of_timm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(of_model("timm:test_vit", "--image=160x160")) == 0
    capsys.readouterr()
    assert main(of_model("timm:resnet81")) == 2
    assert "timm has no model 'resnet81'; near are" in capsys.readouterr().err


def test_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "sweep.png"
    options = ["--sweep=budget", f"--sweep-picture={picture}", "--device=cuda:a100"]
    assert main(of_model(f"{HERE}:small", *options)) == 0
    shown = capsys.readouterr().out
    assert shown.count("the smallest") == shown.count("asked for") == shown.count("plain PyTorch\n") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (of_config("512x512", "--train.budget=null"), "a plan needs a budget"),
        (of_config("512x512", "--train.budget=1B"), "budget"),
        (of_config("0x512"), "--image: '0x512' is not a size in pixels"),
        (of_config("512x512", "--model=VGG"), "--model names a model and --config describes one"),
        (of_config("512x512", "--budget=lots"), "'lots' is not a size"),
        (of_config("512x512", "--device=cuda:abacus"), "no rates for device 'cuda:abacus'"),
        (of_config("512x512", "--sweep-picture=a.png"), "give --sweep budget too"),
        (of_model("AlexNet"), "there is no backbone 'AlexNet'; valid: ResNet,"),
        (of_model("no.such.module:build"), "no.such.module:build cannot be imported"),
        (of_model(f"{HERE}:smal"), "did you mean 'small'?"),
        (of_model(f"{HERE}:needs_width"), "has to work without arguments"),
        (of_model(f"{HERE}:not_a_module"), "is a str; it must be a module"),
        (["plan", "--model=VGG", "--image=64x64"], "budget"),
        (["plan", "--image=64x64", "--budget=1GiB"], "model"),
        (of_model("VGG", "--buget=1GiB"), "did you mean '--budget'?"),
        (of_model("VGG", "--sweep=time"), "expected 'budget'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]
