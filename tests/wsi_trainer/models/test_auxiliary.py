"""A target of the slide learnt beside a class of each pixel: one network, one loss, one run, both predictions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_plugin import Box, LazyImage, TensorSource, TiledModule
from wsi_trainer.models import (
    AttentionPooling,
    BinaryTask,
    HazardTask,
    MaxPooling,
    MultiClassTask,
    RegressionTask,
    SegmentationTask,
    SlideBatch,
    SlideSegmenter,
    Task,
    UNet,
)

CLASSES = ["normal", "tumour"]


def joint(auxiliary: Task, weight: float = 1.0, **arguments: Any) -> SlideSegmenter:
    torch.manual_seed(0)
    task = SegmentationTask(CLASSES, auxiliary=auxiliary, auxiliary_weight=weight)
    return SlideSegmenter(backbone=UNet((4, 6)), task=task, **arguments).double()


def batch_of(image: Any, label: Any, auxiliary: Tensor, **more: Any) -> SlideBatch:
    return SlideBatch(image=image, label=label, slide="a", auxiliary=auxiliary, **more)


IMAGE = torch.randint(0, 256, (1, 3, 61, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
DRAWN = torch.randint(0, 2, (1, 1, 61, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("auxiliary", "target"),
    [
        (BinaryTask(positive_weight=3.0), torch.tensor([1])),
        (MultiClassTask(["a", "b", "c"]), torch.tensor([2])),
        (RegressionTask(), torch.tensor([1.7])),
        (HazardTask(intervals=2), torch.tensor([[3.0, 1.0]])),
    ],
)  # fmt: skip
def test_the_loss_is_the_weighted_sum_of_both(auxiliary: Task, target: Tensor) -> None:
    """Of the losses that either task computes of its own logits, with the gradient of each in the shared network."""
    auxiliary.prepare(
        torch.tensor([[1.0, 1.0], [5.0, 1.0], [9.0, 0.0]]) if isinstance(auxiliary, HazardTask) else target
    )
    model = joint(copy.deepcopy(auxiliary), weight=0.3).eval()
    task = model.task
    assert isinstance(task, SegmentationTask) and task.auxiliary is not None
    loss = model._loss(batch_of(IMAGE, DRAWN, target))
    logits, vector = model.at_pixels_and_pooled(IMAGE)
    assert vector is not None
    of_slide = model.forward_auxiliary(vector)
    torch.testing.assert_close(loss, task.loss(logits, DRAWN) + 0.3 * task.auxiliary.loss(of_slide, target))
    torch.testing.assert_close(logits, model(IMAGE))
    features = model.backbone(model.normalise(IMAGE))
    torch.testing.assert_close(of_slide, model.auxiliary(model.standardise(features.mean(dim=(2, 3)))))


class Counting(TensorSource):
    """An image that counts the pixels that were asked for."""

    pixels = 0

    def read(self, box: Box) -> Tensor:
        self.pixels += box.positions
        return super().read(box)


class Whole(torch.nn.Module):
    """A step: the loss of both."""

    def __init__(self, model: SlideSegmenter) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, label: Tensor, auxiliary: Tensor) -> Tensor:
        return self.model._loss(batch_of(image, label, auxiliary))


@pytest.mark.parametrize("head", [AttentionPooling, MaxPooling])
def test_tile_by_tile_is_plain_pytorch_and_one_run(head: Any) -> None:
    plain = joint(BinaryTask(), 0.5, head=head)
    inner = copy.deepcopy(plain)
    target = torch.tensor([1])
    for _ in range(2):  # the second step standardises by what the first has seen
        plain.zero_grad()
        expected = plain._loss(batch_of(IMAGE, DRAWN, target))
        expected.backward()
    tiled = TiledModule(Whole(inner), tiles=(3, 2))
    for _ in range(2):
        inner.zero_grad()
        source = Counting(IMAGE)
        loss = tiled(LazyImage(source), LazyImage(TensorSource(DRAWN)), target)
        forward = source.pixels
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for mine, its in zip(plain.parameters(), inner.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(its.grad, mine.grad, rtol=0, atol=1e-9)
    for mine, its in zip(plain.buffers(), inner.buffers(), strict=True):
        torch.testing.assert_close(its, mine)
    # Both are made by one pass over the tiles: the loss of pixels alone reads as many.
    alone = SlideSegmenter(backbone=UNet((4, 6)), task=SegmentationTask(CLASSES)).double()
    source = Counting(IMAGE)
    TiledModule(Whole(alone), tiles=(3, 2))(LazyImage(source), LazyImage(TensorSource(DRAWN)), target)
    assert forward == source.pixels


def test_tasks_that_cannot_be_auxiliary() -> None:
    with pytest.raises(ValueError, match="auxiliary is SegmentationTask; it must be a task with one target"):
        SegmentationTask(CLASSES, auxiliary=SegmentationTask(CLASSES))
    for weight in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="auxiliary_weight is"):
            SegmentationTask(CLASSES, auxiliary=BinaryTask(), auxiliary_weight=weight)
    with pytest.raises(ValueError, match=r"model\.magnifications"):
        SlideSegmenter(backbone=UNet((4,)), task=SegmentationTask(CLASSES, auxiliary=BinaryTask()), magnifications=2)
