"""Models of a second library that knows nothing of tiles run unchanged and exactly."""

from __future__ import annotations

import importlib.util

import pytest

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
