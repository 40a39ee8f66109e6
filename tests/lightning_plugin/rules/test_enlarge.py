"""Pooled vectors made as large as the map they came from: they join it as maps, and nobody holds them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from lightning_plugin.graph import ancestors
from lightning_plugin.ops import VectorOp
from tests.exactness import asked
from tests.lightning_plugin.rules.helpers import After, assert_tiled
from tests.sampling import sampled

SHAPE = (2, 3, 23, 17)


def pooled(x: Tensor, n: int) -> Tensor:
    return F.adaptive_avg_pool2d(x, n) if n > 1 else x.mean((2, 3), keepdim=True)


def pyramid(x: Tensor) -> Tensor:
    """The heads of PSPNet and DeepLab."""
    how: Any = {"mode": "bilinear", "align_corners": False}
    return torch.cat([x] + [F.interpolate(pooled(x, n).relu(), size=x.shape[2:], **how) for n in (1, 2, 3)], 1)


CASES: dict[str, Callable[..., Any]] = {
    "pyramid": pyramid,
    "aligned": lambda x: x * F.interpolate(pooled(x, 3), x.shape[2:], mode="bilinear", align_corners=True),
    "cubic": lambda x: x + F.interpolate(pooled(x, 2), x.shape[2:], mode="bicubic"),
    "nearest": lambda x: x - F.interpolate(pooled(x, 2), x.shape[2:]),
    "expand": lambda x: torch.cat([pooled(x, 1).expand(-1, -1, *x.shape[2:]), x], 1),
    "expand as": lambda x: x * pooled(x, 1).sigmoid().expand_as(x),
    "expand channels too": lambda x: x * pooled(x, 1).mean(1, keepdim=True).expand_as(x),
    "repeat": lambda x: torch.cat([pooled(x, 1).repeat(1, 1, x.shape[2], x.shape[3]), x], 1),
    "rows": lambda x: x * x.mean(3, keepdim=True).expand_as(x),
}


@pytest.mark.parametrize(("name", "grids"), sampled(CASES, [((3, 2), (2, 3)), ((5, 7), (1, 1))], every=2))
def test_tiled(name: str, grids: Any) -> None:
    net = After(CASES[name])
    assert_tiled(net, SHAPE, tiles=grids[0], backward_tiles=grids[1])
    assert largest_vector(net) < SHAPE[2] * SHAPE[3]


def largest_vector(net: nn.Module, shape: tuple[int, ...] = SHAPE) -> int:
    """The most positions of any vector that the network computes."""
    out = net(LazyImage.from_tensor(torch.empty(shape, dtype=torch.float64)))
    made = [v for node in ancestors([out._value]) if isinstance(node.op, VectorOp) for v in node.outputs]
    return max((v.fake.numel() // (v.shape[0] * v.shape[1]) for v in made if len(v.shape) > 2), default=0)


def test_position_embedding() -> None:
    """A learned grid, interpolated to the map, gets its gradient."""
    net = After(lambda x, w: x + F.interpolate(w, size=x.shape[2:], mode="bicubic"), w=(1, 4, 5, 4))
    assert_tiled(net, SHAPE)


def test_other_sizes_stay_vectors() -> None:
    """A vector that is resized to something that is no map's extent has nothing to do with a map."""
    net = After(lambda x: F.interpolate(pooled(x, 2), size=(9, 8)).sum((2, 3)))
    assert_tiled(net, SHAPE)
    assert largest_vector(net, (1, *SHAPE[1:])) == 72


def test_autocast() -> None:
    """The casts that autocast puts before an interpolation are recorded with it."""
    torch.manual_seed(0)
    net = After(pyramid)
    x = torch.randn(SHAPE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = net(x)
        tiled = materialize(net(LazyImage.from_tensor(x, engine=asked((3, 2)))))
    assert tiled.dtype == plain.dtype
    torch.testing.assert_close(tiled.float(), plain.float(), rtol=0.02, atol=0.02)
