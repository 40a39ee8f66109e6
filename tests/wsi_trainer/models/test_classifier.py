"""`SlideClassifier` and its tasks."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from wsi_trainer.models import VGG, BinaryTask, MultiClassTask, SlideClassifier
from wsi_trainer.models.finetune import warmup_cosine
from wsi_trainer.models.slide_model import RunningStandardise


def small(**options: object) -> SlideClassifier:
    torch.manual_seed(0)
    return SlideClassifier(backbone=VGG(widths=(4, 8), convs=1), **options)  # type: ignore[arg-type]


def test_bytes_and_floats_of_the_same_image_give_the_same_logits() -> None:
    model = small().eval()
    image = torch.randint(0, 256, (1, 3, 40, 56), dtype=torch.uint8)
    torch.testing.assert_close(model(image), model(image.float() / 255))


def test_normalise_subtracts_the_mean_and_divides_by_the_deviation() -> None:
    image = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)
    values = small(mean=(0.2, 0.1, 0.4), std=(0.5, 0.1, 0.2)).normalise(image)
    torch.testing.assert_close(values[0, :, 0, 0], torch.tensor([0.0, 1.0, -1.0]), atol=1e-6, rtol=0)


def test_a_backbone_without_channels_is_named() -> None:
    with pytest.raises(TypeError, match="Flatten has no integer attribute out_channels"):
        SlideClassifier(backbone=nn.Flatten())


def test_binary_loss_is_the_cross_entropy_with_the_positive_weight() -> None:
    task = BinaryTask(positive_weight=3.0)
    logit = torch.tensor([[0.4]])
    p = 1 / (1 + math.exp(-0.4))
    assert task.loss(logit, torch.tensor([1])).item() == pytest.approx(-3 * math.log(p), rel=1e-5)
    assert task.loss(logit, torch.tensor([0])).item() == pytest.approx(-math.log(1 - p), rel=1e-5)
    torch.testing.assert_close(task.probabilities(logit), torch.tensor([[1 - p, p]]))


def test_the_weight_of_a_class_counts_also_for_a_single_slide() -> None:
    plain = MultiClassTask(["a", "b", "c"])
    weighted = MultiClassTask(["a", "b", "c"], class_weights=[1.0, 5.0, 1.0])
    logits, target = torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([1])
    torch.testing.assert_close(weighted.loss(logits, target), 5 * plain.loss(logits, target))


def test_tasks_refuse_classes_they_cannot_tell_apart() -> None:
    with pytest.raises(ValueError, match="two different names"):
        MultiClassTask(["a", "a"])
    with pytest.raises(ValueError, match="use MultiClassTask"):
        BinaryTask(["a", "b", "c"])
    with pytest.raises(ValueError, match="2 numbers for 3 classes"):
        MultiClassTask(["a", "b", "c"], class_weights=[1.0, 2.0])


def test_standardised_vectors_have_zero_mean_and_unit_variance() -> None:
    layer = RunningStandardise(3, momentum=0.01)
    generator = np.random.default_rng(0)
    mean, deviation = np.array([5.0, -2.0, 100.0]), np.array([0.5, 3.0, 20.0])
    vectors = torch.tensor(generator.normal(mean, deviation, (3000, 3)), dtype=torch.float32)
    for vector in vectors:
        layer(vector[None])
    layer.eval()
    out = layer(vectors)
    torch.testing.assert_close(out.mean(dim=0), torch.zeros(3), atol=0.35, rtol=0)
    torch.testing.assert_close(out.std(dim=0), torch.ones(3), atol=0.35, rtol=0)


def test_the_learning_rate_rises_then_falls_to_a_hundredth() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = warmup_cosine(optimizer, steps=100, warmup=10)
    rates = []
    for _ in range(101):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == sorted(rates[:10]) and rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.01)
