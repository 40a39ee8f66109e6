"""Operators without a rule: run whole and exact where they fit, refused by name where they do not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_plugin import BarrierError, BudgetError, TiledModule, make_plan
from tests.exactness import assert_exact, assert_same_step


class Median(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x, dim=3).values * x


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), Median(), nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1))


def test_a_barrier_in_the_middle_is_exact() -> None:
    assert_exact(net(), (2, 3, 37, 41))


def test_the_plan_names_barriers() -> None:
    plan = make_plan(net(), (1, 3, 256, 256), budget="64MiB")
    assert plan.barriers == ("sort in '2'",)
    assert "sort in '2'" in str(plan)
    tiled = TiledModule(net(), tiles=(2, 2))
    tiled(torch.zeros(1, 3, 32, 32))
    assert tiled.plan is not None and tiled.plan.barriers == plan.barriers and "sort in '2'" in str(tiled.plan)


def test_a_barrier_that_does_not_fit_is_refused_with_its_name_and_the_way_out() -> None:
    with pytest.raises(BarrierError, match=r"sort in '2' has to run whole.*Give at least") as refused:
        make_plan(net(), (1, 3, 4096, 4096), budget="64MiB")
    assert isinstance(refused.value, BudgetError) and refused.value.operator == "sort in '2'"
    assert refused.value.smallest > 64 * 2**20


def test_execution_refuses_before_anything_runs() -> None:
    tiled = TiledModule(net(), budget="1MiB")
    with pytest.raises(BarrierError):
        tiled(torch.randn(1, 3, 512, 512))


class Bag(nn.Module):
    """A bag of patches (N, K, C, H, W), each encoded."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, k = x.shape[:2]
        return self.encoder(x.flatten(0, 1)).view(n, k, -1).mean(1)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 5, 3, padding=1), nn.ConvTranspose2d(3, 4, 2, 2)], ids=["conv", "up"])
def test_an_axis_that_is_mixed_is_exact(layer: nn.Module) -> None:
    """A rank of five may be a volume as well: where it is taken for one, channels are an axis, which a layer mixes."""
    assert_exact(Bag(nn.Conv2d(6, 2, 3)), (2, 3, 6, 13, 11))
    assert not make_plan(Bag(layer.float()), (2, 7, 3, 13, 11), budget="64MiB").barriers
    assert_exact(Bag(layer), (2, 7, 3, 13, 11))


def test_patches_by_their_numbers_are_exact() -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            patches = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 8, 8)
            return self.conv(patches[torch.tensor([0, 3, 5, 3])]).mean((2, 3))

    assert_exact(Picked(), (1, 3, 32, 24))


class Decomposed(nn.Module):
    """An operator without a rule of its own between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x))).mean((2, 3))


DECOMPOSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "triangle": lambda y: y.tril(2),
    "cross product": lambda y: torch.cat([torch.linalg.cross(y[:, :3], y[:, 1:], dim=1), y[:, :1]], 1),
    "infinite": lambda y: y.masked_fill(torch.isposinf(y) | torch.isneginf(y), 0.0),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_an_operator_without_a_rule_is_tiled_as_those_that_pytorch_decomposes_it_into(name: str) -> None:
    module = Decomposed(DECOMPOSED[name])
    assert not make_plan(module, (1, 3, 256, 256), budget="64MiB").barriers
    assert_exact(module, (2, 3, 37, 41))


def packed(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that packs rows of two lengths, as sequences are packed for attention."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([rows[0, :20], rows[0, 20:50]], layout=layout)
        return (nested * 2).to_padded_tensor(0.0)

    return run


def by_offsets(rows: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, 20, len(rows[0])])
    return (torch.nested.nested_tensor_from_jagged(rows[0], offsets).sin() * 2).values()


NESTED = {"jagged": packed(torch.jagged), "strided": packed(torch.strided), "by offsets": by_offsets}


class Nested(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, 4, 3, 2, 1), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NESTED[self.name](self.conv(x).flatten(2).transpose(1, 2)).sum(0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("way", [{"tiles": 2}, {"budget": "2MiB"}], ids=str)
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_made_of_maps_that_are_held_whole(name: str, way: dict[str, Any]) -> None:
    net = Nested(name).double()
    twin, x = copy.deepcopy(net), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert_same_step(net, twin, net(x).square().sum(), TiledModule(twin, **way)(x).square().sum())


OUTER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows by rows": lambda y: (y[:, :, :, None] * y[:, :, None]).reshape(1, 4, -1, y.shape[3]),
    "summed": lambda y: (y[:, :, :, None, :, None] * y[:, :, None, :, None, :]).sum(1),
    "kron": lambda y: torch.kron(y, y.flip(1)),
}


class Outer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, 4, 3, 2, 1), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OUTER[self.name](self.conv(x))


@pytest.mark.parametrize("name", OUTER)
def test_a_map_times_itself_along_other_dimensions(name: str) -> None:
    net = Outer(name).double()
    twin, x = copy.deepcopy(net), torch.randn(1, 3, 24, 22, dtype=torch.float64)
    assert_same_step(net, twin, net(x).square().sum(), TiledModule(twin, tiles=2)(x).square().sum())
