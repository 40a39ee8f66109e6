"""Every head with every task: one step of a Trainer within a budget is the step of plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_plugin import LazyImage, SFTStrategy
from wsi_trainer.models import (
    VGG,
    AttentionPooling,
    AveragePooling,
    BinaryTask,
    ClassAttentionPooling,
    CoxTask,
    GeneralisedMeanPooling,
    HazardTask,
    MaxPooling,
    MultiClassTask,
    MultiLabelTask,
    OrdinalTask,
    Pooling,
    RegressionTask,
    SlideClassifier,
    Task,
    TopKPooling,
)

HEADS = (
    AveragePooling, MaxPooling, GeneralisedMeanPooling, AttentionPooling, ClassAttentionPooling, TopKPooling,
)  # fmt: skip
TASKS: dict[str, tuple[Callable[[], Task], Tensor]] = {
    "binary": (lambda: BinaryTask(positive_weight=2.0, label_smoothing=0.1), torch.tensor([1])),
    "classes": (lambda: MultiClassTask("abc", class_weights=[1, 2, 3]), torch.tensor([2])),
    "labels": (lambda: MultiLabelTask(["x", "y", "z"]), torch.tensor([[1.0, 0.0, float("nan")]])),
    "ordinal": (lambda: OrdinalTask("abcd"), torch.tensor([1])),
    "value": (lambda: RegressionTask(), torch.tensor([1.5])),
    "hazard": (lambda: HazardTask(intervals=3), torch.tensor([[1.5, 1.0]])),
    "cox": (lambda: CoxTask(memory=4), torch.tensor([[2.0, 0.0]])),
}


class Stepped(SlideClassifier):
    """With plain gradient descent a parameter moves by its gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def step(model: SlideClassifier, image: Tensor, target: Tensor, budget: str | None) -> dict[str, Tensor]:
    """What one step makes of the model's tensors."""
    shown = image if budget is None else LazyImage.from_tensor(image)
    batch = {"image": shown, "label": target, "slide": "s"}
    options = {} if budget is None else {"strategy": SFTStrategy(budget=budget)}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, precision="64-true", barebones=True, **options
    )  # fmt: skip
    trainer.fit(model, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    if budget is not None:
        assert trainer.strategy.plan is not None and trainer.strategy.plan.peak_bytes <= 192 * 2**10
    return model.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
@pytest.mark.parametrize("task", TASKS)
def test_a_step_within_a_budget_is_the_step_of_plain_pytorch(task: str, head: type[Pooling]) -> None:
    torch.manual_seed(0)
    make, target = TASKS[task]
    model = Stepped(backbone=VGG(widths=(4, 6), convs=1, stem_stride=2), head=head, task=make()).double()
    if isinstance(model.task, CoxTask):  # somebody to be compared with
        model.task.remembered[:2] = torch.tensor([[0.3, 1.0, 1.0], [-0.2, 3.0, 1.0]])
        model.task.filled.fill_(2)
    image = torch.randint(0, 256, (1, 3, 96, 80), dtype=torch.uint8)
    target = target.double() if target.is_floating_point() else target
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = copy.deepcopy(model)
    expected, actual = step(model, image, target, None), step(other, image, target, "192KiB")
    moved = {name: (expected[name] - old).abs().max() for name, old in before.items()}
    largest = float(max(moved.values()))
    assert largest > 0
    for name, value in expected.items():
        scale = max(float(moved.get(name, value.abs().max())), 1e-3 * largest)
        assert float((value - actual[name]).abs().max()) / scale < 1e-9, name
