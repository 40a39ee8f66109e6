"""Heads that attend over a bag's features, the first of which are repeated to fill a square, or none."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import TOLERANCE, errors
from tests.lightning_plugin.cases import noting
from tests.lightning_plugin.heads import Embedded, TransformerHead, TransMIL


@pytest.mark.slow
@pytest.mark.parametrize("patches", [pytest.param(25, marks=pytest.mark.full), 23, 17])
@pytest.mark.parametrize(
    "head", [lambda: TransformerHead(12, 8, 2, 2), lambda: TransMIL(12, 8, 2, 4, 5)], ids=["transformer", "TransMIL"]
)
def test_head_is_exact_and_tiled(head: type[nn.Module], patches: int) -> None:
    engine = noting((3,), (4,))
    found = errors(Embedded(3, 4, 12, head()), (patches, 3, 4, 4), engine=engine)
    assert max(found.values()) < TOLERANCE, found
    assert not engine.noted


@pytest.mark.slow
def test_the_first_step_holds_what_later_ones_hold() -> None:
    """A search for a plan leaves cycles behind, which must not keep what the step computes until they are collected."""
    torch.manual_seed(0)
    net = Embedded(3, 4, 64, TransformerHead(64, 32, 2, 2))
    image = torch.randn(1500, 3, 4, 4)
    tiled = TiledModule(net, budget="2600KiB")
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            net.zero_grad()
            tiled(LazyImage(image)).sum().backward()
            assert tiled.plan is not None and len(tiled.plan.segments) > 1
            assert tiled.peak_bytes <= tiled.plan.peak_bytes
    finally:
        gc.enable()
