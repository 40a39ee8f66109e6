"""Axes that become plain, and axes that become one, where a rule has no use for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_plugin.graph import Node
from lightning_plugin.planner.make import recorded
from lightning_plugin.rules.uncut import Uncut
from tests.exactness import assert_exact


def flat(side: int) -> nn.Module:
    """A layer that mixes channels and all of space."""
    made = (side // 2) ** 2
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * made, 5))


def uncut(net: nn.Module, shape: tuple[int, ...]) -> list[Node]:
    with recorded(net, shape, torch.float32) as (network, _):
        assert not any(n.op.kind == "barrier" for n in network.nodes)
        return [n for n in network.nodes if isinstance(n.op, Uncut)]


def test_of_few_large_images_space_stays_cut() -> None:
    (node,) = uncut(flat(64), (2, 3, 64, 64))
    assert node.op.axes == (2,) and node.outputs[0].space.extent == (32, 32, 1)  # type: ignore[attr-defined]


def test_of_many_small_images_each_is_whole() -> None:
    (node,) = uncut(flat(8), (300, 3, 8, 8))
    assert node.op.axes == (0, 1) and node.outputs[0].space.extent == (1, 1, 300)  # type: ignore[attr-defined]


def test_both_are_exact() -> None:
    for shape in ((2, 3, 64, 64), (30, 3, 8, 8)):
        assert_exact(flat(shape[2]), shape, tiles=(3, 2, 2), backward_tiles=(2, 3))


class Beside(nn.Module):
    """Tokens of an image, as its rows and columns and as one line, meet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        line = self.conv(x).flatten(2)
        turned = line.flip(2)  # flattened to one axis
        back = (line + turned)[:, :, 3:-2]
        return back.cumsum(1).unflatten(1, (2, 2)).mean(2)


def test_rows_and_columns_as_one_line() -> None:
    for images in (1, 3):
        assert_exact(Beside(), (images, 3, 7, 9), tiles=(3, 2, 2), backward_tiles=(4, 3))
        assert not uncut(Beside(), (images, 3, 7, 9))
