"""Networks of a library that knows nothing of tiles run unchanged and exactly."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.lightning_plugin.architectures import ARCHITECTURES, SAMPLED, Architecture, examine
from tests.lightning_plugin.stubs import timm_alone

pytestmark = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


@pytest.fixture(scope="module")
def timm() -> Iterator[ModuleType]:
    with timm_alone() as module:
        yield module


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
