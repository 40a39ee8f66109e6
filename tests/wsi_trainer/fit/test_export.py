"""`wsi-train export`: a file of the encoder that a run has trained, as the plain network has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from tests.wsi_trainer.fit.whole_bags import VIT, vit
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.models import AttentionPooling, PatchEncoder, SlideClassifier
from wsi_trainer.models.finetune import LowRankLinear
from wsi_trainer.models.weights import load_pretrained

pytestmark = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is absent")
SIZE = 16
SMALL = {"img_size": SIZE, "patch_size": 8, "depth": 2, "embed_dim": 8, "num_heads": 2}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Run, SlideClassifier]:
    """A run with LoRA, and the network that it has trained."""
    content = {
        "out": str(tmp_path / "run"),
        "model": {
            "backbone": vit(SIZE, SMALL),
            "head": "wsi_trainer.models.AttentionPooling",
            "finetune": "lora",
        },
        "data": {"manifest": "manifest.csv", "patches": {"size": SIZE}},
    }
    folder = Run(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.config.write_text(yaml.safe_dump(content))
    torch.manual_seed(1)
    model = SlideClassifier(backbone=PatchEncoder(VIT, SIZE, SMALL), head=AttentionPooling, finetune="lora")
    for layer in model.modules():
        if isinstance(layer, LowRankLinear):
            nn.init.normal_(layer.up)
    torch.save({"state_dict": model.state_dict()}, folder.checkpoint_path("best"))
    return folder, model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder.pt", "encoder.safetensors"])
def test_low_rank_is_merged_into_a_file_that_the_plain_network_takes(
    run: tuple[Run, SlideClassifier], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    words = ["export", str(run[0].path), f"--file={tmp_path / name}"]
    assert main(words) == 0
    plain = PatchEncoder(VIT, SIZE, SMALL)
    match = load_pretrained(plain, tmp_path / name)
    assert match.fits and not match.unexpected
    patches = torch.rand(3, 3, SIZE, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(patches), run[1].backbone(patches), rtol=1e-4, atol=1e-5)
    assert main(words) == 2
    assert "which is there already; choose another name" in capsys.readouterr().err
