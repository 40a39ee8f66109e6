"""What of an encoder is trained: nothing else moves, and tiles train it as plain PyTorch does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_plugin import LazyImage, TiledModule
from wsi_trainer.models import AttentionPooling, PatchEncoder, SlideClassifier
from wsi_trainer.models.finetune import LowRankLinear, merge_low_rank
from wsi_trainer.models.weights import load_pretrained

timm = pytest.importorskip("wsi_trainer.models.backbones")
pytestmark = pytest.mark.skipif(__import__("importlib.util").util.find_spec("timm") is None, reason="timm is absent")
SMALL = {"img_size": 16, "patch_size": 8, "depth": 3, "embed_dim": 12, "num_heads": 2}


def model(**settings: Any) -> SlideClassifier:
    torch.manual_seed(0)
    encoder = PatchEncoder(timm.timm_network("vit_tiny_patch16_224", **SMALL), 16)
    return SlideClassifier(backbone=encoder, head=AttentionPooling, **settings).double()


def is_trained(name: str, what: str) -> bool:
    """Whether a parameter of a ViT of three blocks is, by its name."""
    if not name.startswith("backbone.") or what == "all":
        return True
    name = name.removeprefix("backbone.network.")
    if what == "last":
        return name.startswith(("blocks.2.", "norm."))
    if what == "norms":
        return "norm" in name or name.endswith("bias")
    return what == "lora" and name.endswith((".up", ".down"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all", "last", "lora", "norms", "none"])
def test_what_is_asked_for_is_trained_and_tiles_train_it_as_plain_pytorch(what: Any) -> None:
    plain = model(finetune=what)
    tiled = copy.deepcopy(plain)
    before = copy.deepcopy(plain.state_dict())
    assert {n for n, p in plain.named_parameters() if p.requires_grad} == {
        n for n, _ in plain.named_parameters() if is_trained(n, what)
    }
    torch.manual_seed(1)
    bags = [torch.randint(0, 256, (5 + n, 3, 16, 16), dtype=torch.uint8) for n in range(3)]
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in (plain, tiled)]
    step = TiledModule(tiled, tiles=(1, 1, 3))
    for number in range(6):
        patches, target = bags[number % 3], torch.tensor([number % 2])
        losses = plain.task.loss(plain(patches), target), tiled.task.loss(step(LazyImage.from_tensor(patches)), target)
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(tiled.state_dict()[name], value, rtol=1e-8, atol=1e-8, msg=name)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def test_low_rank_begins_as_the_network_was_and_is_merged_into_it() -> None:
    patches = torch.rand(4, 3, 16, 16, dtype=torch.float64)
    base, changed = model().eval(), model(finetune="lora", lora_rank=3, lora_alpha=6.0).eval()
    torch.testing.assert_close(changed.backbone(patches), base.backbone(patches))
    layers = {n: m for n, m in changed.named_modules() if isinstance(m, LowRankLinear)}
    assert len(layers) == 3 * 4
    torch.manual_seed(2)
    for name, layer in layers.items():
        nn.init.normal_(layer.up)
        with torch.no_grad():
            base.get_submodule(name).weight += 2 * layer.up @ layer.down
    expected = base.backbone(patches)
    torch.testing.assert_close(changed.backbone(patches), expected)
    merge_low_rank(changed)
    assert not [m for m in changed.modules() if isinstance(m, LowRankLinear)]
    torch.testing.assert_close(changed.backbone(patches), expected)
    assert changed.state_dict().keys() == base.state_dict().keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"finetune": "last", "last_stages": 9}, "last_stages is 9; the backbone PatchEncoder has 5 stages"),
        ({"finetune": "none", "frozen_stages": 1}, "leave out model.frozen_stages"),
        ({"finetune": "lora", "lora_rank": 0}, "lora_rank must be 1 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**settings)


def test_weights_from_a_file_go_beside_low_rank(tmp_path: Path) -> None:
    torch.save(model().backbone.network.state_dict(), tmp_path / "weights.pt")
    assert load_pretrained(model(finetune="lora").backbone, tmp_path / "weights.pt").fits
