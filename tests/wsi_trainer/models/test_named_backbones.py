"""Backbones by name: timm's, any import path, and what is said where one is missing."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from wsi_trainer.errors import UserError
from wsi_trainer.models import VGG, ResNet, SlideClassifier
from wsi_trainer.models.backbones import make_backbone, stages_of


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a package look as if it were not installed."""
    original = importlib.import_module

    def remove(missing: str) -> None:
        def fail(name: str, *args: Any) -> Any:
            if name == missing:
                raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
            return original(name, *args)

        monkeypatch.setattr(importlib, "import_module", fail)

    return remove


def test_timm_without_what_it_needs_says_what_is_missing(without: Any) -> None:
    without("timm")
    with pytest.raises(UserError, match=r"timm is not installed: pip install 'wsi-trainer\[networks\]'"):
        make_backbone("timm:resnet18")
    with pytest.raises(UserError, match="segmentation_models_pytorch is not installed"):
        without("segmentation_models_pytorch")
        make_backbone("smp:unet:resnet18")


def test_an_import_path_makes_a_backbone() -> None:
    assert isinstance(make_backbone("wsi_trainer.models.ResNet"), ResNet)
    assert isinstance(make_backbone(None), VGG)
    network = VGG(widths=(4,))
    assert make_backbone(network) is network


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wsi_trainer.models.ResNeXt", "nothing can be imported as 'wsi_trainer.models.ResNeXt'"),
        ("resnet18", "nothing can be imported as 'resnet18'"),
        ("builtins.dict", "makes a dict, not a torch module"),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_backbone(name)


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_a_network_of_timm_trains_as_a_backbone() -> None:
    backbone = make_backbone("timm:resnet10t")
    assert (backbone.out_channels, backbone.stride) == (512, 32)
    assert len(stages_of(backbone)) == 6
    model = SlideClassifier(backbone=backbone, frozen_stages=2)
    model(torch.zeros(1, 3, 96, 64, dtype=torch.uint8)).sum().backward()
    first, last = stages_of(backbone)[0], stages_of(backbone)[-1]
    assert all(p.grad is None for p in first.parameters()) and all(p.grad is not None for p in last.parameters())
    with pytest.raises(UserError, match=r"timm has no model 'resnet18x'; near are resnet18"):
        make_backbone("timm:resnet18x")
    with pytest.raises(UserError, match="timm:vit_tiny_patch16_224 returns no map of features"):
        make_backbone("timm:vit_tiny_patch16_224")
