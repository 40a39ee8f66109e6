"""Training on bags of patches through `fit` is plain PyTorch with the whole bag in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.wsi_trainer.fit.whole_bags import SHARE, SIZE, SPLITS, STRIDE, TRAINED_ON, resnet, train_whole, whole_bag
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.metrics import ClassPredictions
from wsi_trainer.models import AttentionPooling, PatchEncoder, ResNet, SlideClassifier

EPOCHS = 2


@pytest.fixture
def config(bag_stores: Path, tmp_path: Path) -> Path:
    content = {
        "out": str(tmp_path / "run"),
        "model": {"backbone": resnet(4, 8), "head": "wsi_trainer.models.AttentionPooling", "learning_rate": 0.01},
        "data": {
            "manifest": str(bag_stores / "manifest.csv"),
            "flip_rotate": False,
            "patches": {"size": SIZE, "stride": STRIDE, "min_tissue": SHARE, "flip_rotate": False},
        },
        "train": {"epochs": EPOCHS, "accelerator": "cpu", "precision": "64-true", "resamples": 20, "loggers": ["csv"]},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_fit_is_plain_pytorch_with_the_whole_bag_in_memory(bag_stores: Path, config: Path, tmp_path: Path) -> None:
    assert main(["fit", f"--config={config}", "--train.budget=1MiB"]) == 0
    run = Run(tmp_path / "run")
    trained = torch.load(run.checkpoint("last"), weights_only=True)["state_dict"]
    bags = [whole_bag(bag_stores / f"s{number}.zarr") for number in range(len(SPLITS))]
    assert min(map(len, bags)) > 5

    torch.manual_seed(0)  # train.seed
    encoder = PatchEncoder(ResNet((4, 8), norm="group"), SIZE)
    model = SlideClassifier(backbone=encoder, head=AttentionPooling, learning_rate=0.01).double().train()
    train_whole(model, bags[:TRAINED_ON], [0, 1, 0], EPOCHS, rate=0.01)
    moved = 0.0
    torch.manual_seed(0)
    initial = PatchEncoder(ResNet((4, 8), norm="group"), SIZE).double().state_dict()
    for name, value in model.state_dict().items():
        if name == "seen":
            continue
        torch.testing.assert_close(trained[name].double(), value.double(), rtol=1e-8, atol=1e-8, msg=name)
        if name.startswith("backbone."):
            moved = max(moved, float((value - initial[name.removeprefix("backbone.")]).abs().max()))
    assert moved > 1e-2
    assert read_json(run.memory)["step_peak_bytes"] < read_json(run.memory)["plain_bytes"] / 2

    predicted = ClassPredictions.read(run.predictions("test"))
    best = torch.load(run.checkpoint("best"), weights_only=True)["state_dict"]
    model.load_state_dict(best)
    model.eval()
    with torch.no_grad():
        said = torch.cat([model.task.predict(model(bags[number])) for number in (5, 6)])
    np.testing.assert_allclose(predicted.probabilities, said.numpy(), atol=1e-8)


def test_plain_pytorch_and_tiles_see_the_same_augmented_bags(
    bag_stores: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights; and the estimate, the saved config and a plan for another bag say what is trained."""
    more = ["--train.epochs=1", "--data.patches.flip_rotate=true", "--data.patches.shift=4", "--data.patches.stain=0.1",
            "--data.flip_rotate=true", "--data.shift=9", "--data.tint=0.02", "--data.patches.mpp=own",
            "--data.patches.over=slide", "--data.patches.stride=79"]  # fmt: skip
    for name, budget in (("plain", "null"), ("tiled", "1MiB")):
        capsys.readouterr()
        assert main(["fit", f"--config={config}", *more, f"--out={tmp_path / name}", f"--train.budget={budget}"]) == 0
    said, run = capsys.readouterr().out, Run(tmp_path / "tiled")
    tiled, plain = (torch.load(Run(tmp_path / n).checkpoint("last"), weights_only=True) for n in ("tiled", "plain"))
    for name, value in plain["state_dict"].items():
        torch.testing.assert_close(tiled["state_dict"][name], value, rtol=1e-8, atol=1e-8, msg=name)
    assert f"the largest has 9 patches of {SIZE} × {SIZE}" in said  # as all have, so that one plan serves them
    assert read_json(run.estimate)["pixels"]["train"] == TRAINED_ON * 9 * SIZE**2
    saved = yaml.safe_load(run.config.read_text())["data"]["patches"]
    assert saved["mpp"] == "own" and saved["shift"] == 4
    assert main(["plan", f"--config={run.config}", "--patches=300"]) == 0
    assert f"300 x 3 x {SIZE} x {SIZE}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.patches=null"], "model.backbone is PatchEncoder, which takes patches, and data.patches is not given"),
        (["--data.patches.size=64"], "data.patches.size is 64 and model.backbone.size is 32; give both one value"),
        (
            ["--model.backbone=wsi_trainer.models.VGG"],
            "model.backbone VGG takes an image; set model.backbone to PatchE",
        ),
        (["--model.pool_over=tissue"], "model.pool_over is tissue, which is for whole images; data.patches.over"),
        (["--data.patches.mpp=20x"], "data.patches.mpp: '20x' is not valid; expected float or 'own'"),
        (
            ["--data.patches.mpp=0.1"],
            "s0.zarr: has 0.5 µm a pixel; mpp 0.1 is finer and would invent pixels; set data.patches.mpp",
        ),
        (["--data.patches.positions=nowhere"], "data.patches.positions is nowhere; there is no such folder"),
        (["--model.backbone.network=os.getcwd"], "os.getcwd is not a class of wsi_trainer.models"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"--config={config}", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("wsi-train: error:") and message in error


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["plan", "--image=500x500"], "--image does not go with this config, whose data.patches is given"),
        (["plan"], "a plan needs --patches: K, as 10000"),
        (["plan", "--patches=0"], "--patches is 0; it must be 1 or more"),
        (["plan", "--patches=9", "--data.patches=null", "--model.backbone=null"], "--patches does not go with this"),
    ],
)
def test_commands_say_where_bags_have_no_place(
    config: Path, command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], f"--config={config}", "--train.budget=1GiB", *command[1:]]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
