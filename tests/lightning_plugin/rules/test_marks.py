"""Tiles whose boxes have the same sizes and the same marks are the same computation, wherever they lie.

What was found for one of them is used for the others: an operator that keeps silent about something that its result
depends on would compute one tile with what belongs to another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.boxes import Box
from lightning_plugin.execute import run as running
from lightning_plugin.execute.frame import Frame
from lightning_plugin.graph import Node, ancestors
from lightning_plugin.ops import ReduceOp, TileOp
from tests.exactness import flat
from tests.lightning_plugin.rules.helpers import After

SHAPE = (1, 3, 24, 20)
PICKED = torch.tensor([0, 1, 2, 3, 4, 6, 5, 7, 8, 11, 9, 10, 12, 15, 14, 13, 16, 17, 18, 19])


def windows(x: Tensor, size: int) -> Tensor:
    return x.unfold(2, size, size).unfold(3, size, size)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "convolution": lambda x: F.conv2d(x, torch.ones(2, 4, 5, 3, dtype=x.dtype), padding=(2, 1), stride=(1, 2)),
    "dilated": lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3, dtype=x.dtype), padding=3, dilation=3),
    "transposed": lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 5, 4, dtype=x.dtype), stride=(3, 2), padding=1),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pool with indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max pool, ceil": lambda x: F.max_pool2d(x, 4, 3, 2, ceil_mode=True),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average pool without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (12, 15)),
    "adaptive maximum": lambda x: F.adaptive_max_pool2d(x, (12, 15)),
    "adaptive maximum with indices": lambda x: F.adaptive_max_pool2d(x, (12, 15), return_indices=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=1.5),
    "exact nearest": lambda x: F.interpolate(x, size=(30, 30), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, size=(36, 50), mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, size=(47, 39), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "antialiased": lambda x: F.interpolate(x, size=(9, 8), mode="bilinear", antialias=True),
    "constant pad": lambda x: F.pad(x, (2, 1, 3, 2), value=1.5),
    "reflect": lambda x: F.pad(x, (2, 1, 3, 2), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1, 3, 2), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1, 3, 2), mode="circular"),
    "flip and roll": lambda x: x.flip(2).roll((5, -3), (2, 3)),
    "strided": lambda x: x[:, :, 1::3, ::2],
    "picked by numbers": lambda x: x[:, :, PICKED],
    "put together": lambda x: torch.cat([x[:, :, 7:], x, x[:, :, :9]], 2),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 3, padding=1, stride=2),
    "patches": lambda x: windows(x, 4),
    "a view of windows, and back": lambda x: x.view(1, 4, 6, 4, 5, 4).permute(0, 1, 2, 4, 3, 5).relu(),
    "joined": lambda x: x.view(1, 4, 12, 2, 20).flatten(2, 3),
    "softmax": lambda x: x.softmax(1) + x.softmax(3),
    "beside a row": lambda x: x * torch.arange(20, dtype=x.dtype) + x[:, :, :1],
}


def nodes(function: Callable[[Tensor], Any]) -> list[Node]:
    out = After(function).double()(LazyImage.from_tensor(torch.empty(SHAPE, dtype=torch.float64)))
    values = [t._value for t in flat(out) if hasattr(t, "_value")]  # type: ignore[attr-defined]
    return [node for node in ancestors(values) if isinstance(node.op, TileOp) and node.outputs[0].is_map]


def alike(node: Node, length: int) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes that differ on one axis only, and by what their operator says are the same there."""
    assert isinstance(node.op, TileOp)
    extent = node.outputs[0].space.extent
    for axis, size in enumerate(extent):
        kinds: dict[Hashable, list[Box]] = defaultdict(list)
        for lo in range(size - length + 1):
            box = Box.of((0, min(n, length)) for n in extent).replace(axis, lo, lo + length)
            sizes = tuple(need.extent for need in node.op.need(box))
            kinds[node.op.mark(axis, lo, lo + length), sizes].append(box)
        for boxes in kinds.values():
            yield from pairwise(boxes[:4])


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_marked_alike_is_the_same_computation(function: Callable[[Tensor], Any], length: int) -> None:
    torch.manual_seed(0)
    pairs = 0
    for node in nodes(function):
        assert isinstance(node.op, TileOp)
        vectors = [torch.randn(v.shape, dtype=torch.float64).to(v.dtype) for v in node.vectors]
        for one, other in alike(node, length):
            shapes = [v.space.tile_shape(need) for v, need in zip(node.maps, node.op.need(one), strict=True)]
            if any(v.dtype != torch.float64 for v in node.maps):
                continue  # positions, which are no numbers like others
            tiles = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            first = node.op.apply(one, [t.clone() for t in tiles], vectors)
            second = node.op.apply(other, [t.clone() for t in tiles], vectors)
            assert first.shape == node.outputs[0].space.tile_shape(one)
            torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12, msg=f"{node.op}: {one} and {other}")
            bound = node.op.kernel_for(other)([t.clone() for t in tiles], vectors)
            torch.testing.assert_close(bound, first, rtol=1e-12, atol=1e-12, msg=f"{node.op}: {one}, at {other}")
            pairs += 1
    assert pairs > 5, "hardly any tiles are alike"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(2).softmax(-1), lambda x: x.mean((2, 3)), lambda x: x.var((2, 3)), lambda x: x.amax((2, 3)),
        lambda x: x.logsumexp((2, 3)), lambda x: F.batch_norm(x, None, None, training=True),
    ],
)  # fmt: skip
def test_what_places_have_no_say_in_is_the_same_for_identical_tiles(function: Callable[[Tensor], Any]) -> None:
    """Else a plan would not count on sharing, and no result would show it."""
    out = After(function).double()(LazyImage.from_tensor(torch.empty(SHAPE, dtype=torch.float64)))
    reductions = [n for n in ancestors([out._value]) if isinstance(n.op, ReduceOp)]
    assert reductions and all(node.op.uniform for node in reductions)


@pytest.mark.parametrize("images", [2, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.group_norm(x, 2, torch.ones(4, dtype=x.dtype)), lambda x: F.instance_norm(x),
        lambda x: F.layer_norm(x, x.shape[1:]), lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.normalize(x.flatten(2), dim=2), lambda x: x.softmax(1) * x.flatten(2).softmax(-1).view(x.shape),
    ],
)  # fmt: skip
def test_vectors_have_the_shapes_that_were_recorded(
    function: Callable[[Tensor], Any], images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans count on them."""
    frames: list[Frame] = []
    ran = running.run_stages

    def run(prepared: Any, frame: Frame, queue: Any) -> None:
        frames.append(frame)
        ran(prepared, frame, queue)

    monkeypatch.setattr(running, "run_stages", run)
    TiledModule(After(function).double(), tiles=(2, 2))(torch.randn(images, *SHAPE[1:], dtype=torch.float64))
    found = {v: t for frame in frames for v, t in frame.vectors.items()}
    assert len(found) > 2
    for v, t in found.items():
        assert tuple(v.shape) == tuple(t.shape) and v.dtype == t.dtype, v.node
