"""Attributions add up to the score, lie where the evidence is, and have the network's stride."""

import pytest
import torch
from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import attribute
from wsi_trainer.models import VGG, AveragePooling, SlideClassifier


class Shrink(nn.Module):
    """The mean of each patch of four pixels a side: features that are known."""

    out_channels, stride = 3, 4

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 4)


def test_with_an_average_the_map_adds_up_to_the_logit_but_for_a_constant() -> None:
    torch.manual_seed(0)
    model = SlideClassifier(backbone=VGG((4, 8)), head=AveragePooling).double().eval()
    images = torch.randint(0, 256, (3, 1, 3, 48, 64), dtype=torch.uint8)
    rests = []
    for image in images:
        with torch.no_grad():
            logit = model(image)[0, 0]
        rests.append(float(logit - attribute(model, image).values.sum()))
    assert rests == pytest.approx([rests[0]] * 3, abs=1e-9)


class WeighedShrink(Shrink):
    """Asked for its gradient through a parameter, as every backbone has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


def test_a_backbone_with_a_wrong_stride_is_named() -> None:
    class Wrong(WeighedShrink):
        stride = 8

    with pytest.raises(ValueError, match="10 × 6 positions where its stride gives 5 × 3"):
        attribute(SlideClassifier(backbone=Wrong()), torch.zeros(1, 3, 40, 24, dtype=torch.uint8))


def test_attention_needs_a_head_that_has_it() -> None:
    with pytest.raises(UserError, match="AveragePooling has no attention"):
        attribute(SlideClassifier(backbone=Shrink()), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), method="attention")


def test_the_model_is_left_as_it_was() -> None:
    model = SlideClassifier(backbone=VGG((4, 8)), frozen_stages=1).train()
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    attribute(model, torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    assert model.training and not model.backbone._forward_hooks and not model.backbone._forward_pre_hooks
    assert [p.requires_grad for p in model.parameters()] == wanted and not all(wanted)
    assert all(p.grad is None for p in model.parameters())
