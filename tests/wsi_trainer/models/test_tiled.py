"""The classifier executed tile by tile is the classifier: same logits, gradients and statistics."""

import copy
from collections.abc import Callable

import pytest
import torch

from lightning_plugin import LazyImage, TiledModule
from wsi_trainer.models import (
    VGG,
    AttentionPooling,
    AveragePooling,
    Backbone,
    ConvNeXt,
    GeneralisedMeanPooling,
    MaxPooling,
    Pooling,
    ResNet,
    SlideClassifier,
    TopKPooling,
)

BACKBONES: dict[str, Callable[[], Backbone]] = {
    "VGG": lambda: VGG((4, 8), stem_stride=2),
    "VGG, BatchNorm": lambda: VGG((4, 8), norm="batch"),
    "VGG, LayerNorm": lambda: VGG((4, 8), norm="channel"),
    "ResNet, BatchNorm": lambda: ResNet((4, 8)),
    "ResNet, GroupNorm": lambda: ResNet((4, 8), norm="group"),
    "ConvNeXt": lambda: ConvNeXt((4, 8), (1, 1)),
}
HEADS = (AveragePooling, MaxPooling, GeneralisedMeanPooling, AttentionPooling, TopKPooling)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_two_slides_of_different_sizes_give_what_plain_pytorch_gives(backbone: str, head: type[Pooling]) -> None:
    torch.manual_seed(0)
    plain = SlideClassifier(backbone=BACKBONES[backbone](), head=head).double()
    network = copy.deepcopy(plain)
    tiled = TiledModule(network, tiles=(3, 2))
    for size in ((97, 83), (64, 131)):
        image = torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8)
        expected = plain(image)
        actual = tiled(LazyImage.from_tensor(image))
        target = torch.tensor([1])
        plain.task.loss(expected, target).backward()
        network.task.loss(actual, target).backward()
        torch.testing.assert_close(torch.as_tensor(actual.tolist()).double(), expected.detach(), rtol=0, atol=1e-6)
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, one), other in zip(plain.named_parameters(), network.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        scale = max(float(one.grad.abs().max()), 1e-3 * largest)
        assert float((one.grad - other.grad).abs().max()) / scale < 1e-9, name
    for (name, one_buffer), other_buffer in zip(plain.named_buffers(), network.buffers(), strict=True):
        torch.testing.assert_close(other_buffer, one_buffer, rtol=1e-9, atol=1e-9, msg=name)
