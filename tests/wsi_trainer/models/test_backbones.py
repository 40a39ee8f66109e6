"""The backbones: shapes, strides, norms and errors."""

import importlib
from importlib.util import find_spec
from typing import Any, get_args

import pytest
import torch

from wsi_trainer.errors import UserError
from wsi_trainer.models import VGG, Backbone, ResNet, SlideClassifier, UNet
from wsi_trainer.models.backbones import NormKind, describe, make_backbone, stages_of

BACKBONES = (
    VGG(widths=(4, 8)),
    VGG(widths=(4, 8, 8), convs=1, stem_stride=2),
    ResNet(widths=(4, 8), norm="group"),
    UNet(widths=(4, 6, 8)),
)


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda b: f"{type(b).__name__}-{b.stride}")
def test_out_channels_and_stride_are_what_the_map_has(backbone: Backbone) -> None:
    features = backbone(torch.rand(1, 3, 6 * backbone.stride, 4 * backbone.stride))
    assert features.shape == (1, backbone.out_channels, 6, 4)


@pytest.mark.parametrize("norm", get_args(NormKind))
@pytest.mark.parametrize("make", [VGG, ResNet, UNet])
def test_every_norm_trains_every_parameter(make: type[VGG] | type[ResNet] | type[UNet], norm: NormKind) -> None:
    torch.manual_seed(0)
    backbone = make(widths=(4, 8), norm=norm)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01)
    before = [p.detach().clone() for p in backbone.parameters()]
    for _ in range(3):  # the last layer of a block may start at zero, and then passes no gradient at first
        optimizer.zero_grad()
        backbone(torch.rand(1, 3, 32, 32)).square().sum().backward()
        optimizer.step()
    same = [n for (n, p), old in zip(backbone.named_parameters(), before, strict=True) if torch.equal(p, old)]
    # A bias before a norm that takes the mean away has no gradient but rounding.
    assert not same


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda b: f"{type(b).__name__}-{b.stride}")
def test_the_stages_are_all_of_it_in_order(backbone: Backbone) -> None:
    stages = [p for stage in backbone.stages() for p in stage.parameters()]
    assert [id(p) for p in stages] == [id(p) for p in backbone.parameters()]
    assert len(backbone.stages()) > 1 and all(list(stage.parameters()) for stage in backbone.stages())


def test_what_an_unknown_network_returns_is_found_out() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, 2, 1), torch.nn.BatchNorm2d(5), torch.nn.MaxPool2d(2))
    assert describe(network) == (5, 4)
    assert network.training and network[1].num_batches_tracked == 0
    assert [type(stage) for stage in stages_of(network)] == [torch.nn.Conv2d, torch.nn.BatchNorm2d]
    with pytest.raises(TypeError, match=r"returns a tensor of shape \(1, 196608\) instead of a map"):
        describe(torch.nn.Flatten())
    with pytest.raises(TypeError, match="asking it with an image failed"):
        describe(torch.nn.Conv2d(4, 4, 1))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="widths is"):
        VGG(widths=())
    with pytest.raises(ValueError, match="widths is"):
        UNet(widths=(4, 0))
    with pytest.raises(ValueError, match="norm is 'layer'"):
        VGG(norm="layer")  # type: ignore[arg-type]


# -- backbones by name: timm's, any import path, and what is said where one is missing


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
