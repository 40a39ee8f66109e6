"""Networks of a library that knows nothing of tiles run unchanged and exactly."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest

from tests.lightning_plugin.architectures import ARCHITECTURES, SAMPLED, Architecture, examine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


@pytest.fixture(scope="module")
def timm() -> ModuleType:
    import tests.torchvision_stub  # noqa: F401

    return importlib.import_module("timm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=[] if a.label in SAMPLED else [pytest.mark.full]) for a in ARCHITECTURES],
    ids=lambda a: a.label,
)
def test_architecture_is_exact(timm: ModuleType, architecture: Architecture) -> None:
    row = examine(timm, architecture)
    assert row["result"] in ("pass", "barrier"), row


def test_there_are_enough() -> None:
    assert len({a.name for a in ARCHITECTURES}) >= 20
