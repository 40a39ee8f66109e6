"""The backbones: shapes, strides, norms and errors."""

from typing import get_args

import pytest
import torch

from wsi_trainer.models import VGG, Backbone, ResNet, UNet
from wsi_trainer.models.backbones import describe, stages_of
from wsi_trainer.models.layers import NormKind, StandardisedConv2d

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


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda b: f"{type(b).__name__}-{b.stride}")
def test_takes_slides_whose_sides_no_stride_divides(backbone: Backbone) -> None:
    features = backbone(torch.rand(1, 3, 61, 83))
    assert features.shape[:2] == (1, backbone.out_channels) and features.isfinite().all()


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


def test_a_standardised_filter_does_not_see_a_flat_image() -> None:
    conv = StandardisedConv2d(3, 4, 3, padding=1)
    torch.nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    inner = conv(torch.full((1, 3, 9, 9), 0.7))[..., 1:-1, 1:-1]
    torch.testing.assert_close(inner, torch.zeros_like(inner), atol=1e-5, rtol=0)


def test_a_standardised_filter_has_the_length_of_its_gain() -> None:
    conv = StandardisedConv2d(3, 4, 3, padding=1)
    impulse = torch.zeros(1, 3, 9, 9)
    energy = torch.zeros(4)
    for channel in range(3):
        impulse.zero_()
        impulse[0, channel, 4, 4] = 1
        energy += (conv(impulse) - conv(torch.zeros_like(impulse))).square().sum(dim=(0, 2, 3))
    torch.testing.assert_close(energy, torch.full((4,), 3.0), rtol=1e-3, atol=0)


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
