"""A ViT on bags through `fit`, whatever of it is trained, is plain PyTorch with the whole bag in memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_plugin import Plan
from tests.wsi_trainer.fit.whole_bags import TRAINED_ON, VIT, train_whole, vit, whole_bag
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.models import AttentionPooling, PatchEncoder, SlideClassifier

pytestmark = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is absent")
SIZE, STRIDE, RATE = 32, 79, 0.01  # nine patches of each slide, so that one plan serves all
SMALL = {"img_size": SIZE, "patch_size": 8, "depth": 2, "embed_dim": 8, "num_heads": 2, "mlp_ratio": 2.0}
WHAT: dict[str, dict[str, Any]] = {"all": {}, "last": {"last_stages": 2}, "lora": {"lora_rank": 2}, "none": {}}
CASES = ["lora", *(pytest.param(what, marks=pytest.mark.full) for what in ("all", "last", "none"))]


@pytest.mark.parametrize("what", CASES)
def test_steps_of_a_fit_are_those_of_plain_pytorch(
    what: str, bag_stores: Path, tmp_path: Path, count: Callable[..., int]
) -> None:
    epochs = count(ci=2, full=17)  # of three slides: 50 steps and one
    content = {
        "out": str(tmp_path / "run"),
        "model": {
            "backbone": vit(SIZE, SMALL),
            "head": "wsi_trainer.models.AttentionPooling",
            "learning_rate": RATE,
            "finetune": what,
            **WHAT[what],
        },
        "data": {
            "manifest": str(bag_stores / "manifest.csv"),
            "flip_rotate": False,
            "patches": {"size": SIZE, "stride": STRIDE, "over": "slide", "flip_rotate": False},
        },
        "train": {"epochs": epochs, "accelerator": "cpu", "precision": "64-true", "resamples": 20, "loggers": ["csv"]},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert main(["fit", f"--config={tmp_path / 'config.yaml'}", "--train.budget=300KiB"]) == 0

    torch.manual_seed(0)  # train.seed
    settings = {"finetune": what, **WHAT[what]}
    backbone = PatchEncoder(VIT, SIZE, SMALL)
    model = SlideClassifier(backbone=backbone, head=AttentionPooling, **settings).double().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bags = [whole_bag(bag_stores / f"s{n}.zarr", SIZE, STRIDE, share=0) for n in range(TRAINED_ON)]
    assert [len(bag) for bag in bags] == [9] * TRAINED_ON
    train_whole(model, bags, [0, 1, 0], epochs, RATE)

    run = Run(tmp_path / "run")
    trained = torch.load(run.checkpoint("last"), weights_only=True)["state_dict"]
    learnt = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, value in model.state_dict().items():
        if name != "seen":
            torch.testing.assert_close(trained[name].double(), value.double(), rtol=1e-8, atol=1e-8, msg=name)
    for name in before.keys() & dict(model.named_parameters()):
        assert torch.equal(trained[name].double(), before[name]) != (name in learnt), name
    plan = Plan.from_json(run.plan.read_text())
    assert max(segment.forward.tiles for segment in plan.segments) > 1, "nothing was tiled"
