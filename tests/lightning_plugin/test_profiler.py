"""Names of the engine's work in PyTorch's profiler."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.progress import profiler_range


@pytest.mark.slow
def test_a_profile_shows_steps_segments_tiles_and_transfers() -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    net = nn.Sequential(*layers, nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(1, 3, 64, 72)
    tiled = TiledModule(net, budget="160KiB")
    for _ in range(2):
        tiled(LazyImage(x)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        tiled(LazyImage(x)).sum().backward()
    found = Counter(e.name for e in profiler.events() if e.name.startswith("lightning_plugin: "))
    plan = tiled.plan
    assert plan is not None and any(segment.tier == "disk" for segment in plan.segments)
    named = [name.removeprefix("lightning_plugin: ") for name in found]
    for place, segment in enumerate(plan.segments):
        for direction in ("forward", "backward"):
            assert f"segment {place} {segment.path} {direction}" in named
    tiles = sum(segment.forward.tiles + segment.backward.tiles for segment in plan.segments)
    assert tiles / 2 < found["lightning_plugin: tile"] <= tiles
    assert {"step", "plan", "transfer"} <= set(named)


def test_no_range_is_opened_where_no_profiler_is_on() -> None:
    assert profiler_range("tile") is profiler_range("step")
