"""Models of a second library that knows nothing of tiles run unchanged and exactly."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.lightning_plugin.models_of_transformers import MODELS, SAMPLED, Model, examine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=[] if m.label in SAMPLED else [pytest.mark.full]) for m in MODELS],
    ids=lambda m: m.label,
)
def test_model_is_exact(model: Model) -> None:
    import transformers

    row = examine(transformers, model)
    assert row["result"] == "pass", row


def test_sampled_models_are_there() -> None:
    assert set(SAMPLED) <= {m.label for m in MODELS}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("ViTForImageClassification", ["labels"]),
        ("LayoutLMv3ForQuestionAnswering", ["start_positions", "end_positions"]),
    ],
)
def test_the_trainer_finds_the_labels(name: str, labels: list[str]) -> None:
    """By the class of a module; without them it evaluates neither loss nor metrics, and says nothing."""
    import transformers
    from transformers.utils import can_return_loss, find_labels

    from lightning_plugin import TiledModule

    kind = getattr(transformers, name)
    with torch.device("meta"):
        tiled = TiledModule(kind(kind.config_class(num_hidden_layers=1)), tiles=2)
    assert find_labels(type(tiled)) == find_labels(kind) == labels
    assert can_return_loss(type(tiled)) == can_return_loss(kind)
