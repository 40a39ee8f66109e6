"""Each head against its definition."""

import math

import pytest
import torch

from wsi_trainer.models import (
    AttentionPooling,
    AveragePooling,
    ClassAttentionPooling,
    GeneralisedMeanPooling,
    MaxPooling,
    Pooling,
    TopKPooling,
)

HEADS = (AveragePooling, MaxPooling, GeneralisedMeanPooling, AttentionPooling, TopKPooling)


@pytest.fixture
def features() -> torch.Tensor:
    return torch.rand(2, 5, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1


@pytest.mark.parametrize("head", HEADS)
def test_gives_one_vector_for_each_slide_and_a_gradient_for_each_channel(
    head: type[Pooling], features: torch.Tensor
) -> None:
    features.requires_grad_()
    pooling = head(5).double()
    vector = pooling(features)
    assert vector.shape == (2, pooling.out_channels)
    (gradient,) = torch.autograd.grad(vector.square().sum(), features)
    assert (gradient.abs().amax(dim=(2, 3)) > 0).all()


@pytest.mark.parametrize("head", HEADS)
def test_does_not_depend_on_where_a_position_lies(head: type[Pooling], features: torch.Tensor) -> None:
    pooling = head(5).double()
    order = torch.randperm(63, generator=torch.Generator().manual_seed(1))
    moved = features.flatten(2)[:, :, order].view_as(features)
    torch.testing.assert_close(pooling(moved), pooling(features))


def test_the_generalised_mean_lies_between_average_and_maximum(features: torch.Tensor) -> None:
    average, maximum = AveragePooling(5)(features), MaxPooling(5)(features)
    torch.testing.assert_close(GeneralisedMeanPooling(5, p=1)(features), average)
    between = GeneralisedMeanPooling(5, p=6)(features)
    assert ((average < between) & (between < maximum)).all()
    torch.testing.assert_close(GeneralisedMeanPooling(5, p=500)(features), maximum, rtol=0.02, atol=0)


def test_the_generalised_mean_of_a_dead_channel_is_finite_and_has_a_finite_gradient() -> None:
    features = torch.zeros(1, 2, 4, 4, requires_grad=True)
    GeneralisedMeanPooling(2)(features).sum().backward()
    assert features.grad is not None and features.grad.isfinite().all()


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
