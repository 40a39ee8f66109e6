"""Any network that makes a vector or a map of an image encodes the patches of a bag."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import assert_same_step
from wsi_trainer.errors import UserError
from wsi_trainer.models import (
    AttentionPooling,
    AveragePooling,
    ClassAttentionPooling,
    GeneralisedMeanPooling,
    MaxPooling,
    PatchEncoder,
    Pooling,
    ResNet,
    SlideClassifier,
    TopKPooling,
)

HEADS = (AttentionPooling, AveragePooling, MaxPooling, TopKPooling, GeneralisedMeanPooling, ClassAttentionPooling)
VIT = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}


def check(encoder: PatchEncoder, head: type[Pooling], count: int) -> None:
    """A bag in tiles of a third of its patches gives what plain PyTorch gives."""
    plain = SlideClassifier(backbone=encoder, head=head).double()
    network = copy.deepcopy(plain)
    patches = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    target = torch.tensor([1])
    expected = plain.task.loss(plain(patches), target)
    tiled = TiledModule(network, tiles=(1, 1, 3) if count > 1 else (1, 1))
    actual = network.task.loss(tiled(LazyImage.from_tensor(patches)), target)
    assert_same_step(plain, network, expected, actual)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_pools_a_bag(head: type[Pooling]) -> None:
    torch.manual_seed(0)
    check(PatchEncoder(ResNet((4, 8)), 32), head, 7)


@pytest.mark.parametrize("count", [1, 8])
def test_a_vit_of_timm(count: int) -> None:
    torch.manual_seed(0)
    encoder = PatchEncoder("timm:vit_tiny_patch16_224", 32, VIT)
    assert encoder.out_channels == 24
    check(encoder, AttentionPooling, count)


def test_the_map_has_a_position_for_each_patch() -> None:
    torch.manual_seed(0)
    encoder = PatchEncoder(ResNet((4, 8), norm="group"), 32)
    patches = torch.rand(5, 3, 32, 32)
    features = encoder(patches)
    assert features.shape == (1, 8, 5, 1)
    for number in range(5):
        alone = encoder.network(patches[number : number + 1]).mean((2, 3))[0]
        torch.testing.assert_close(features[0, :, number, 0], alone)


def test_a_patch_that_a_network_does_not_take_is_told_when_it_is_built() -> None:
    with pytest.raises(UserError, match=r"does not take patches of 48 × 48 \(.*\); set model\.backbone\.size"):
        PatchEncoder("timm:vit_tiny_patch16_224", 48, VIT)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2)


def test_a_network_of_tokens_and_arguments_for_another_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"returns a tensor of shape \(2, 3, 1024\) .* must return a vector"):
        PatchEncoder(Tokens(), 32)
    with pytest.raises(ValueError, match="are those of a network of timm"):
        PatchEncoder(ResNet((4,)), 32, {"img_size": 3})


def test_its_stages_are_those_of_the_network() -> None:
    model = SlideClassifier(backbone=PatchEncoder(ResNet((4, 8)), 32), frozen_stages=1)
    assert 0 < sum(p.requires_grad for p in model.backbone.parameters()) < len(list(model.backbone.parameters()))
