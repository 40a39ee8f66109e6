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
    ClassAttentionPooling,
    GeneralisedMeanPooling,
    MaxPooling,
    MultiClassTask,
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
}
HEADS = (AveragePooling, MaxPooling, GeneralisedMeanPooling, AttentionPooling, TopKPooling)
PAIRS = [(backbone, head) for backbone in BACKBONES for head in HEADS]


@pytest.mark.parametrize(("backbone", "head"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.__name__)
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


HEADS_OF_TISSUE = (*HEADS, ClassAttentionPooling)


@pytest.mark.parametrize("head", HEADS_OF_TISSUE, ids=lambda head: head.__name__)
def test_two_magnifications_pooled_over_tissue_give_what_plain_pytorch_gives(head: type[Pooling]) -> None:
    torch.manual_seed(0)
    backbone = VGG((4, 6), convs=1)
    plain = SlideClassifier(
        backbone=backbone, head=head, task=MultiClassTask("ab"), magnifications=2, pool_over="tissue"
    ).double()  # fmt: skip
    network = copy.deepcopy(plain)
    tiled = TiledModule(network, tiles=(3, 2))
    sizes = ((97, 83), (48, 41))
    images = [torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8) for size in sizes]
    tissue = [(torch.rand(1, 1, -(-h // 4), -(-w // 4)) < 0.2).to(torch.uint8) for h, w in sizes]
    expected = plain(images[0], images[1:], tissue)
    lazy = [LazyImage.from_tensor(t) for t in (*images, *tissue)]
    actual = tiled(lazy[0], lazy[1:2], lazy[2:])
    target = torch.tensor([1])
    plain.task.loss(expected, target).backward()
    network.task.loss(actual, target).backward()
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, one), other in zip(plain.named_parameters(), network.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        scale = max(float(one.grad.abs().max()), 1e-3 * largest)
        assert float((one.grad - other.grad).abs().max()) / scale < 1e-9, name
