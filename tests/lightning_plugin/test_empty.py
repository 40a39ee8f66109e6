"""Batches and maps without positions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, materialize
from tests.exactness import difference
from tests.zoo import fill

NETS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3)),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    ),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("how", [{"tiles": 2}, {"budget": "1MiB"}])
@pytest.mark.parametrize("name", NETS)
def test_an_empty_batch_is_plain_pytorchs(name: str, how: dict[str, Any], lazy: bool) -> None:
    plain = fill(NETS[name]().double())
    tiled = copy.deepcopy(plain)
    x, y = (torch.zeros(0, 3, 16, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected, actual = plain(x), TiledModule(tiled, **how)(LazyImage.from_tensor(y) if lazy else y)
    expected.sum().backward()
    actual.sum().backward()
    assert torch.equal(materialize(actual), expected)
    assert x.grad is not None and y.grad is not None and y.grad.shape == x.grad.shape
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(q.grad, p.grad)
    for a, b in zip(plain.buffers(), tiled.buffers(), strict=True):
        assert torch.equal(a, b)


class Picked(nn.Module):
    """The norm of a part of a map."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.part = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), part

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.part(self.conv(x)))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "images": lambda h: h[:0],
    "rows": lambda h: h[:, :, 3:3],
    "split": lambda h: h.split([0, 14], 3)[0],
    "tensor_split": lambda h: h.tensor_split((0, 3, 3), 2)[2],
    "diff": lambda h: h.diff(14, 2),
    "mask": lambda h: h[torch.zeros(2, dtype=torch.bool)],
    "gather": lambda h: h.gather(2, torch.zeros(2, 4, 0, 14, dtype=torch.long)),
    "take_along_dim": lambda h: h.take_along_dim(torch.zeros(2, 4, 0, 14, dtype=torch.long), 2),
    "bmm": lambda h: torch.bmm(h[:, 0, :0], h[:, 0])[:, None].expand(2, 4, 0, 14),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(h[:, :, :0], h, h),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_without_positions_is_plain_pytorchs(name: str) -> None:
    plain = fill(Picked(PARTS[name]).double())
    tiled = copy.deepcopy(plain)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected, actual = plain(x), TiledModule(tiled, tiles=2)(x)
    (expected.sum() + 1).backward()
    (actual.sum() + 1).backward()
    assert actual.shape == expected.shape and actual.requires_grad
    for p, q in zip(plain.conv.parameters(), tiled.conv.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(q.grad, p.grad)
    for a, b in zip(plain.buffers(), tiled.buffers(), strict=True):
        assert torch.equal(a, b)


class Joined(nn.Module):
    """Two maps, concatenated, of one of which a piece without elements is taken."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.join = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.a(x), self.b(x))


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an axis": lambda a, b: torch.cat([a[..., :0], b], -1),
    "an axis, in the middle": lambda a, b: torch.cat([b, a[..., 5:5], b], -1),
    "channels": lambda a, b: torch.cat([a[:, :0], b], 1),
    "images": lambda a, b: torch.cat([a[:0], b]),
    "images, one by one": lambda a, b: torch.cat([a[:0], b[:1], b[1:]]),
    "split": lambda a, b: torch.cat([a.split([0, 14], 3)[0], b], 3),
    "tensor_split": lambda a, b: torch.cat([a.tensor_split((0, 3, 3), 2)[2], b], 2),
    "of one map": lambda a, b: torch.cat([b[..., :0], b, a[..., :0].detach()], -1),
    "of the map before": lambda a, b: torch.cat([b[..., :0], b.relu()], -1),
    "of a small result": lambda a, b: torch.cat([a.mean(3, keepdim=True)[:, :, :, :0], b], -1),
}


@pytest.mark.parametrize("how", [{"tiles": 2}, {"budget": "90KiB"}, {"budget": "10MiB"}], ids=str)
@pytest.mark.parametrize("name", JOINS)
def test_the_gradient_of_a_piece_without_elements_is_zero(name: str, how: dict[str, Any]) -> None:
    plain = fill(Joined(JOINS[name]).double())
    tiled = copy.deepcopy(plain)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected, actual = plain(x), TiledModule(tiled, **how)(x)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert difference(actual, expected) < 1e-12
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert (q.grad is None) == (p.grad is None)
        assert p.grad is None or torch.allclose(q.grad, p.grad, rtol=1e-10, atol=1e-12)


def test_a_piece_without_elements_adds_nothing_where_the_rest_gets_the_gradient() -> None:
    h = nn.Conv2d(3, 4, 3)(LazyImage.from_tensor(torch.zeros(1, 3, 16, 16)))
    rest = torch.cat([h[:, :0], h[:, 0:].relu()], 1)  # as rotary embeddings leave out a prefix
    other = torch.cat([h[:, :0].relu(), h.detach()], 1)
    assert not rest._value.node.vectors and other._value.node.vectors
