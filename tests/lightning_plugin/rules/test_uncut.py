"""Axes that become plain, and axes that become one, where a rule has no use for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin.graph import Node
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.rules.concat import Concat
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


class Picked(nn.Module):
    """Tokens, and a class token before them, of those patches of several images that are picked by number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Conv2d(3, 4, 2, 2), nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 6, 6).unfold(3, 6, 6).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 6, 6)
        patches = patches[torch.arange(len(patches) - 1)]
        tokens = self.embed(patches).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        return tokens.softmax(1)[:, 0].sum(0, keepdim=True)


class Windows(nn.Module):
    """Windows as one axis, multiplied with windows whose images are the axis: each image's query for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        windows = self.conv(x).unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(-1, 16, 4)
        query = self.conv(x).mean((2, 3)).view(n, 1, 1, 4).expand(n, 6, 16, 4).reshape(6 * n, 16, 4)
        return (query @ windows.transpose(1, 2)).relu().mean((0, 1))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("net", "size"), [(Picked(), (12, 18)), (Windows(), (8, 12))], ids=["picked", "windows"])
def test_images_and_what_is_cut_out_of_them_meet(net: nn.Module, size: tuple[int, int], images: int) -> None:
    assert_exact(net, (images, 3, *size), tiles=(2, 2, 2))
    uncut(net.float(), (images, 3, *size))


class Slices(nn.Module):
    """Patches that a loop cuts out of an image, put together, and attention over the tokens of each."""

    def __init__(self, stack: bool) -> None:
        super().__init__()
        self.embed, self.stack = nn.Conv2d(3, 4, 2, 2), stack

    def forward(self, x: Tensor) -> Tensor:
        cut = [x[:, :, a : a + 6, b : b + 6] for a in range(0, 12, 6) for b in range(0, 18, 6)][:5]
        patches = torch.stack([c[0] for c in cut]) if self.stack else torch.cat(cut)
        tokens = self.embed(patches).flatten(2).transpose(1, 2)
        found = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).mean(1)
        return (torch.softmax(found.sum(1, keepdim=True), 0) * found).sum(0, keepdim=True)


@pytest.mark.parametrize("stack", [False, True], ids=["cat", "stack"])
def test_slices_put_together_are_images_that_tiles_cut(stack: bool) -> None:
    assert_exact(Slices(stack), (1, 3, 12, 18), tiles=(1, 1, 4), backward_tiles=(1, 1, 5))
    with recorded(Slices(stack), (1, 3, 12, 18), torch.float32) as (network, _):
        (made,) = (n.outputs[0] for n in network.nodes if isinstance(n.op, Concat))
        assert made.space.extent == (6, 6, 5) and not any(n.op.kind == "barrier" for n in network.nodes)
