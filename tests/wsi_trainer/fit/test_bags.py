"""Training on bags of patches through `fit` is plain PyTorch with the whole bag in memory."""

import csv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_plugin import Plan
from tests.wsi_trainer.fit.whole_bags import (
    SHARE,
    SIZE,
    SPLITS,
    TRAINED_ON,
    VIT,
    assert_predicted_alike,
    assert_trained_alike,
    resnet,
    train_whole,
    vit,
    whole_bag,
    write_exact,
)  # fmt: skip
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.models import AttentionPooling, PatchEncoder, ResNet, SlideClassifier

SMALL_VIT = {"img_size": SIZE, "patch_size": 8, "depth": 2, "embed_dim": 8, "num_heads": 2, "mlp_ratio": 2.0}
FINETUNE: dict[str, dict[str, Any]] = {"lora": {"lora_rank": 2}, "all": {}, "last": {"last_stages": 2}, "none": {}}
PATIENTS = {"ann": (0, 3), "bob": (1,), "cyd": (2, 4), "dee": (5, 6)}


@pytest.fixture
def config(bag_stores: Path, tmp_path: Path) -> Path:
    return write_exact(tmp_path, bag_stores / "manifest.csv", resnet(4, 8), 2, patches={"min_tissue": SHARE})


def built(network: Any, *arguments: Any, **settings: Any) -> SlideClassifier:
    """The network of a run, as it begins."""
    torch.manual_seed(0)  # train.seed
    encoder = PatchEncoder(network() if callable(network) else network, SIZE, *arguments)
    return SlideClassifier(backbone=encoder, head=AttentionPooling, **settings).double()


def test_a_fit_is_plain_pytorch_with_the_whole_bag_in_memory(bag_stores: Path, config: Path, tmp_path: Path) -> None:
    assert main(["fit", f"--config={config}", "--train.budget=300KiB"]) == 0
    run = Run(tmp_path / "run")
    bags = [whole_bag(bag_stores / f"s{number}.zarr") for number in range(len(SPLITS))]
    assert {len(bag) for bag in bags} == {9}
    model = built(lambda: ResNet((4, 8), norm="group"))
    before = {name: value.clone() for name, value in model.backbone.named_parameters()}
    train_whole(model, bags[:TRAINED_ON], [0, 1, 0], 2)
    assert_trained_alike(run, model)
    assert (
        max(float((value - before[name]).detach().abs().max()) for name, value in model.backbone.named_parameters())
        > 1e-2
    )
    assert read_json(run.memory)["step_peak_bytes"] < read_json(run.memory)["plain_bytes"] / 2
    assert_predicted_alike(run, model, bags[5:])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("timm") is None, reason="timm is absent")
@pytest.mark.parametrize("what", [pytest.param(w, marks=() if w == "lora" else pytest.mark.full) for w in FINETUNE])
def test_a_fit_of_a_vit_is_plain_pytorch(
    what: str, bag_stores: Path, tmp_path: Path, count: Callable[..., int]
) -> None:
    """Whatever of it is trained: nothing else moves."""
    epochs = count(ci=1, full=17)  # of three slides: 50 steps and one
    settings = {"finetune": what, **FINETUNE[what]}
    config = write_exact(
        tmp_path, bag_stores / "manifest.csv", vit(SIZE, SMALL_VIT), epochs, patches={"over": "slide"}, **settings
    )
    assert main(["fit", f"--config={config}", "--train.budget=300KiB"]) == 0
    model = built(VIT, SMALL_VIT, **settings)
    before = {name: value.clone() for name, value in model.named_parameters()}
    train_whole(model, [whole_bag(bag_stores / f"s{n}.zarr") for n in range(TRAINED_ON)], [0, 1, 0], epochs)
    run = Run(tmp_path / "run")
    assert_trained_alike(run, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    plan = Plan.from_json(run.plan.read_text())
    assert max(segment.forward.tiles for segment in plan.segments) > 1, "nothing was tiled"


@pytest.mark.slow
def test_a_patient_is_one_bag_one_label_and_one_prediction(
    bag_stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["slide,label,patient,split"]
    for number, (split, (patient, slides)) in enumerate(zip(("train", "train", "val", "test"), PATIENTS.items())):
        lines += [f"{bag_stores}/s{slide}.zarr,{number % 2},{patient},{split}" for slide in slides]
    manifest = tmp_path / "manifest.csv"
    manifest.write_text("\n".join(lines) + "\n")
    data = {"group": "patient"}
    config = write_exact(tmp_path, manifest, resnet(4), 2, patches={"over": "slide"}, data=data)
    assert main(["fit", f"--config={config}", "--train.budget=1500KiB"]) == 0
    run = Run(tmp_path / "run")
    bags = {
        patient: torch.cat([whole_bag(bag_stores / f"s{slide}.zarr") for slide in slides])
        for patient, slides in PATIENTS.items()
    }
    assert f"the largest has {max(len(bags['ann']), len(bags['bob']))} patches" in capsys.readouterr().out
    model = built(lambda: ResNet((4,), norm="group"))
    train_whole(model, [bags["ann"], bags["bob"]], [0, 1], 2)
    assert_trained_alike(run, model)
    predicted = assert_predicted_alike(run, model, [bags["dee"]])
    assert predicted.slides == predicted.patients == ("dee",)
    assert main(["report", str(run.path)]) == 0 and "dee" in run.report.read_text()
    assert main(["predict", str(run.path), str(manifest), "--name=all"]) == 0
    with (run.path / "cohorts" / "all" / "predictions.csv").open() as file:
        assert [row["slide"] for row in csv.DictReader(file)] == list(PATIENTS)


@pytest.mark.slow
def test_plain_pytorch_and_tiles_see_the_same_augmented_bags(
    bag_stores: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights; and the estimate, the saved config and a plan for another bag say what is trained."""
    more = ["--train.epochs=1", "--data.patches.flip_rotate=true", "--data.patches.shift=4", "--data.patches.stain=0.1",
            "--data.flip_rotate=true", "--data.shift=9", "--data.tint=0.02", "--data.patches.mpp=own",
            "--data.patches.over=slide"]  # fmt: skip
    for name, budget in (("plain", "null"), ("tiled", "300KiB")):
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
    assert main(["plan", f"--config={run.config}", "--patches=300", "--train.budget=4MiB"]) == 0
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
        (["plan", "--data.manifest=absent.csv"], "a plan needs --patches K, as 10000, or the slides"),
        (["plan", "--patches=0"], "--patches is 0; it must be 1 or more"),
        (["plan", "--patches=9", "--data.patches=null", "--model.backbone=null"], "--patches does not go with this"),
    ],
)
def test_commands_say_where_bags_have_no_place(
    config: Path, command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], f"--config={config}", "--train.budget=1GiB", *command[1:]]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
