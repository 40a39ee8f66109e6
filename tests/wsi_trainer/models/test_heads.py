"""Each head against its definition."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_plugin import LazyImage, SFTStrategy
from tests.sampling import sampled
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

HEADS = (AveragePooling, MaxPooling, GeneralisedMeanPooling, AttentionPooling, TopKPooling)


@pytest.fixture
def features() -> torch.Tensor:
    return torch.rand(2, 5, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1


def test_the_generalised_mean_lies_between_average_and_maximum(features: torch.Tensor) -> None:
    average, maximum = AveragePooling(5)(features), MaxPooling(5)(features)
    torch.testing.assert_close(GeneralisedMeanPooling(5, p=1)(features), average)
    between = GeneralisedMeanPooling(5, p=6)(features)
    assert ((average < between) & (between < maximum)).all()
    torch.testing.assert_close(GeneralisedMeanPooling(5, p=500)(features), maximum, rtol=0.02, atol=0)


def test_attention_weighs_by_the_softmax_of_its_scores(features: torch.Tensor) -> None:
    pooling = AttentionPooling(5).double()
    scores = pooling.scores(features)
    expected = torch.zeros(2, 5, dtype=torch.float64)
    for slide in range(2):
        weights = [math.exp(score) for score in scores[slide].flatten().tolist()]
        for weight, position in zip(weights, features[slide].flatten(1).T, strict=True):
            expected[slide] += weight / sum(weights) * position
    torch.testing.assert_close(pooling(features), expected)


def test_top_k_is_the_mean_of_the_largest(features: torch.Tensor) -> None:
    largest = features.flatten(2).sort(dim=-1, descending=True).values[..., :3].mean(dim=-1)
    torch.testing.assert_close(TopKPooling(5, k=3)(features), largest)
    torch.testing.assert_close(TopKPooling(5, k=1000)(features), AveragePooling(5)(features))


@pytest.mark.parametrize("share", [0.03, 0.5])
@pytest.mark.parametrize("head", (*HEADS, ClassAttentionPooling))
def test_over_tissue_is_the_pooling_of_a_slide_of_tissue_alone(
    head: type[Pooling], share: float, features: torch.Tensor
) -> None:
    torch.manual_seed(3)
    one = (features[:1] - 0.5).requires_grad_()
    pooling = head(5)
    pooling.attach(2)
    pooling.double()
    counts = (torch.rand(1, 1, 7, 9) < share).double()  # with 3 % fewer positions count than `TopKPooling` has k
    counts[..., 2, 3] = 1
    alone = one[:, :, counts[0, 0] == 1][:, :, None]
    torch.testing.assert_close(pooling(one, counts), pooling(alone))
    (gradient,) = torch.autograd.grad(pooling(one, counts).square().sum(), one)
    assert (gradient[:, :, counts[0, 0] == 0] == 0).all() and gradient.abs().sum() > 0


def test_each_class_attends_by_itself(features: torch.Tensor) -> None:
    pooling = ClassAttentionPooling(5)
    pooling.attach(3)
    pooling.double()
    vectors = pooling(features).unflatten(1, (3, 5))
    weights = pooling.scores(features).flatten(2).softmax(dim=2)
    torch.testing.assert_close(vectors, weights @ features.flatten(2).transpose(1, 2))
    assert (pooling.branches, pooling.out_channels) == (3, 15)


def test_refuses_numbers_that_define_no_pooling() -> None:
    with pytest.raises(ValueError, match=r"p is 0\.5"):
        GeneralisedMeanPooling(3, p=0.5)
    with pytest.raises(ValueError, match="k is 0"):
        TopKPooling(3, k=0)


# -- every head with every task: one step of a Trainer within a budget is the step of plain PyTorch


EVERY_HEAD = (
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
    batch = {"image": shown, "targets": {"label": target}, "slide": "s"}
    options = {} if budget is None else {"strategy": SFTStrategy(budget=budget)}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, precision="64-true", barebones=True, **options
    )  # fmt: skip
    trainer.fit(model, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    if budget is not None:
        assert trainer.strategy.plan is not None and trainer.strategy.plan.peak_bytes <= 192 * 2**10
    return model.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "head"), sampled(TASKS, EVERY_HEAD, every=6))
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
