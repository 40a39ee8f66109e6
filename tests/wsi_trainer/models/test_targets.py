"""Several targets of one network: one loss, labels that are absent, a target of the slide beside one of pixels."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_plugin import Box, LazyImage, TensorSource, TiledModule
from wsi_trainer.errors import UserError
from wsi_trainer.metrics import VALUE_SCORES
from wsi_trainer.models import (
    AttentionPooling,
    BinaryTask,
    CoxTask,
    FrozenFeatures,
    HazardTask,
    MaxPooling,
    ModelConfig,
    MultiClassTask,
    MultiLabelTask,
    OrdinalTask,
    RegressionTask,
    SegmentationTask,
    SlideBatch,
    SlideClassifier,
    SlideSegmenter,
    Task,
    UNet,
    make_model,
)
from wsi_trainer.models.tasks import Owners
from wsi_trainer.models.weights import present_weights

CLASSES = ["normal", "tumour"]


def joint(second: Task, weight: float = 1.0, **arguments: Any) -> SlideSegmenter:
    torch.manual_seed(0)
    targets = {"regions": SegmentationTask(CLASSES), "label": second}
    model = SlideSegmenter(backbone=UNet((4, 6)), targets=targets, target_weights={"label": weight}, **arguments)
    return model.double()


def batch_of(image: Any, drawn: Any, label: Tensor, **more: Any) -> SlideBatch:
    return SlideBatch(image=image, targets={"regions": drawn, "label": label}, slide="a", **more)


IMAGE = torch.randint(0, 256, (1, 3, 61, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
DRAWN = torch.randint(0, 2, (1, 1, 61, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("second", "target"),
    [
        (BinaryTask(positive_weight=3.0), torch.tensor([1])),
        (MultiClassTask(["a", "b", "c"]), torch.tensor([2])),
        (RegressionTask(), torch.tensor([1.7])),
        (HazardTask(intervals=2), torch.tensor([[3.0, 1.0]])),
    ],
)  # fmt: skip
def test_the_loss_is_the_weighted_sum_of_both(second: Task, target: Tensor) -> None:
    """The sum of the losses of both tasks, computed of their own logits, and the gradients in the shared network."""
    second.prepare(torch.tensor([[1.0, 1.0], [5.0, 1.0], [9.0, 0.0]]) if isinstance(second, HazardTask) else target)
    model = joint(copy.deepcopy(second), weight=0.3).eval()
    drawn, label = model.task.by_target.values()
    loss = model._loss(batch_of(IMAGE, DRAWN, target))
    logits, vector = model.at_pixels_and_pooled(IMAGE)
    assert vector is not None
    of_slide = model.forward_head(vector)
    torch.testing.assert_close(loss, drawn.loss(logits, DRAWN) + 0.3 * label.loss(of_slide, target))
    torch.testing.assert_close(logits, model(IMAGE))
    features = model.backbone(model.normalise(IMAGE))
    torch.testing.assert_close(of_slide, model.slide_classifier(model.standardise(features.mean(dim=(2, 3)))))


def test_a_task_of_1_0_is_that_of_two_targets() -> None:
    """`auxiliary` of a config and its weights: the same initial weights, loss and predictions."""
    torch.manual_seed(0)
    with pytest.deprecated_call(match=r"model\.targets"):
        task = SegmentationTask(CLASSES, auxiliary=BinaryTask(), auxiliary_weight=0.3)
    former = SlideSegmenter(backbone=UNet((4, 6)), task=task).double()
    model = joint(BinaryTask(), 0.3)
    assert list(former.task.by_target) == ["regions", "label"] and former.task.columns == ("regions", "label")
    names = {"task.tasks.0": "task", "task.tasks.1": "task.auxiliary", "slide_classifier": "auxiliary"}
    kept = {}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, former.state_dict()[name], rtol=0, atol=0)
        new = next((new for new in names if name.startswith(f"{new}.")), "")
        kept[names.get(new, "") + name.removeprefix(new)] = value
    assert "auxiliary.weight" in kept and "task.auxiliary.weight.values" in kept and "task.weights.values" in kept
    assert present_weights(kept).keys() == model.state_dict().keys()
    batch = batch_of(IMAGE, DRAWN, torch.tensor([1]))
    for one, two in zip(model._scored(batch), former._scored(batch), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


TASKS: dict[str, Task] = {
    "tumour": BinaryTask(column="tumour"),
    "grade": OrdinalTask(["low", "mid", "high"], column="grade"),
    "age": RegressionTask("age"),
    "survival": HazardTask(intervals=2),
    "mutations": MultiLabelTask(["kras", "tp53"]),
}
CELLS = {"tumour": "1", "grade": "high", "age": "61", "time": "3", "event": "1", "kras": "1", "tp53": ""}
VECTOR = torch.linspace(-1, 1, 6)[None]


def several() -> SlideClassifier:
    torch.manual_seed(0)
    backbone = FrozenFeatures(width=6)
    return SlideClassifier(backbone=backbone, targets=copy.deepcopy(TASKS), target_weights={"age": 0.5}).eval()


def test_several_targets_share_a_layer_and_add_up() -> None:
    model = several()
    targets = model.task.read(CELLS)
    assert list(targets) == list(TASKS)
    logits = model.forward_head(VECTOR)
    assert logits.shape == (1, 1 + 1 + 1 + 2 + 2)
    parts = {part.name: part.task.loss(logits[:, part.logits], targets[part.name]) for part in model.task.slide_parts}
    expected = sum((0.5 if name == "age" else 1.0) * loss for name, loss in parts.items())
    torch.testing.assert_close(model.task.loss_of(logits, targets), expected)
    assert model.task.names == (
        *("probability_0", "probability_1", "probability_low", "probability_mid", "probability_high", "value"),
        *("risk", "survival_1", "survival_2", "probability_kras", "probability_tp53"),
    )


@pytest.mark.parametrize("known", TASKS)
def test_what_is_not_known_pulls_nothing(known: str) -> None:
    """A slide with one label: the gradient is that of a model of this target, and zero in the rows of the others."""
    columns = TASKS[known].columns
    model = several()
    targets = model.task.read({name: cell if name in columns else "" for name, cell in CELLS.items()})
    assert list(targets) == [known]
    model.task.loss_of(model.forward_head(VECTOR), targets).backward()
    (place,) = [part.logits for part in model.task.slide_parts if part.name == known]
    gradient = model.classifier.weight.grad
    assert gradient is not None and gradient[place].any()
    gradient[place] = 0
    assert not gradient.any(), "others have gradients too, of zeros: devices wait for each other's"


def test_a_slide_without_any_label_is_refused() -> None:
    with pytest.raises(UserError, match="has no label at all in the columns tumour, grade"):
        several().task.read(dict.fromkeys(CELLS, ""))
    with pytest.raises(UserError, match="has the grade 'hihg', which is none of the classes"):
        several().task.read(CELLS | {"grade": "hihg"})


def test_predictions_are_by_target_with_the_labels_that_are_known() -> None:
    model = several()
    lines = [CELLS, CELLS | {"grade": "", "kras": ""}, CELLS | {"tumour": "", "age": "", "event": "0"}]
    rows = torch.cat([model.task.row(model.task.read(line)).double() for line in lines])
    predicted = model.task.predict(model.forward_head(VECTOR)).double().repeat(3, 1)
    owners = Owners(("s", "t", "u"), ("p", "q", "q"))
    predictions = model.task.predictions(owners, rows.numpy(), predicted.detach().numpy())
    slides = {name: part.slides for name, part in predictions.by_target.items()}
    assert slides == {
        "tumour": ("s", "t"), "grade": ("s", "u"), "age": ("s", "t"), "survival": ("s", "t", "u"),
        "mutations": ("s", "u"),
    }  # fmt: skip
    alone = TASKS["age"].predictions(
        Owners(("s", "t"), ("p", "q")), rows[:2, 2].numpy(), predicted[:2, 5:6].detach().numpy()
    )
    np.testing.assert_array_equal(predictions.by_target["age"].truth, alone.truth)
    assert model.task.scores["age_mean_absolute_error"](predictions) == VALUE_SCORES["mean_absolute_error"](alone)


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

    def forward(self, image: Tensor, drawn: Tensor, label: Tensor) -> Tensor:
        return self.model._loss(batch_of(image, drawn, label))


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


@pytest.mark.parametrize(
    ("targets", "weights", "message"),
    [
        ({"a": BinaryTask(), "b": SegmentationTask(CLASSES)}, {}, "b has a class for each pixel"),
        ({"a": SegmentationTask(CLASSES), "b": SegmentationTask(CLASSES)}, {}, "one of these may come, as the first"),
        ({"a": BinaryTask(), "b": CoxTask()}, {"c": 1.0}, "target_weights names 'c'"),
        ({"a": BinaryTask(), "b": CoxTask()}, {"b": 0.0}, "target_weights: b is 0.0"),
        ({"a": BinaryTask(), "b": CoxTask()}, {"b": float("nan")}, "target_weights: b is nan"),
        ({"a b": BinaryTask(), "b": CoxTask()}, {}, "targets names 'a b'"),
        ({}, {}, "model.targets and model.task"),
    ],
)
def test_targets_that_do_not_go_together(targets: Any, weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(ModelConfig(targets=targets, target_weights=weights))


def test_pixels_have_one_magnification() -> None:
    targets: dict[str, Task] = {"regions": SegmentationTask(CLASSES), "label": BinaryTask()}
    with pytest.raises(ValueError, match=r"model\.magnifications"):
        SlideSegmenter(backbone=UNet((4,)), targets=targets, magnifications=2)
