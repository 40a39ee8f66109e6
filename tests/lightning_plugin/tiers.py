"""Two worlds for the machine of the tiers: a plain network, and the same one in tiles whose maps and parameters live
elsewhere."""

from __future__ import annotations

import copy
import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import TiledModule
from lightning_plugin.engine import Engine
from lightning_plugin.graph import Recording
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.parameters import streamable
from lightning_plugin.plans import Planner

SHAPES = ((1, 3, 22, 18), (2, 3, 17, 24))


class Layers(nn.Module):
    """Statistics, a shortcut, maxima, and a head: of each kind of what backward needs, something."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.deep, self.again = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.last = nn.Conv2d(6, 5, 3, stride=2)
        self.wide, self.head = nn.Linear(5, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + torch.nn.functional.gelu(self.again(self.deep(x)))
        x = self.last(torch.nn.functional.max_pool2d(x, 2)).mean((2, 3))
        return self.head(torch.tanh(self.wide(x)))


@dataclass(eq=False)
class Placed(Engine):
    """Plans whose maps and parameters live where they are told to: ``tiers`` are those of its segments, ``parameters``
    those of its parameters, again and again."""

    tiers: tuple[str, ...] = ("device",)
    parameters: tuple[str, ...] = ("device",)
    ahead: tuple[bool, ...] = (False,)
    fetched_ahead: bool = False
    drop: tuple[int, ...] = (0,)

    def choose(self, recording: Recording) -> Plan:
        plan = super().choose(recording)
        segments = []
        for i, s in enumerate(plan.segments):
            tier = self.tiers[i % len(self.tiers)]
            drop = self.drop[i % len(self.drop)] if tier == "device" else 0
            segments.append(replace(s, tier=tier, ahead=self.ahead[i % len(self.ahead)], drop=drop))
        there: dict[str, list[int]] = {"device": [], "host": [], "disk": []}
        for i, place in enumerate(streamable(Network(recording), least=1)):
            there[self.parameters[i % len(self.parameters)]].append(place)
        return replace(
            plan,
            segments=tuple(segments),
            on_host=tuple(there["host"]),
            on_disk=tuple(there["disk"]),
            fetched_ahead=self.fetched_ahead,
        )


@dataclass
class Way:
    """How the tiled world runs: on tiles, with everything placed by hand, or within a budget."""

    tiles: tuple[int, int] = (2, 2)
    backward_tiles: tuple[int, int] = (2, 3)
    tiers: tuple[str, ...] = ("device",)
    parameters: tuple[str, ...] = ("device",)
    ahead: tuple[bool, ...] = (False,)
    fetched_ahead: bool = False
    drop: tuple[int, ...] = (0,)
    budget: int | None = None
    calls: int = 1

    def tiled(self, net: nn.Module, folder: Path) -> TiledModule:
        """A network run in this way, with its files in a folder."""
        if self.budget is not None:
            return TiledModule(net, budget=self.budget, calls=self.calls, disk=str(folder))
        made = TiledModule(net, tiles=self.tiles)
        options = Options(tiles=self.tiles, backward_tiles=self.backward_tiles, disk=str(folder))
        made.engine = Placed(
            Planner(options),
            tiers=self.tiers,
            parameters=self.parameters,
            ahead=self.ahead,
            fetched_ahead=self.fetched_ahead,
            drop=self.drop,
        )
        return made


@dataclass
class World:
    """A network, the module that is called for it, and its optimizer."""

    net: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    calls: list[Tensor] = field(default_factory=list)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, foreach=False),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-4, foreach=False),
}


def network() -> nn.Module:
    torch.manual_seed(11)
    return Layers().double()


def image(which: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[which], dtype=torch.float64, generator=generator)


def copied(world: World, way: Way | None, folder: Path, whole: bool, optimizer: str) -> World:
    """A world of deep copies: of the network, or (``whole``) of the module that is called for it, as an average of
    weights copies it."""
    module: nn.Module
    if way is None:
        net = copy.deepcopy(world.net)
        module = net
    elif whole:
        module = copy.deepcopy(world.module)
        net = module.module  # type: ignore[assignment]
    else:
        net = copy.deepcopy(world.net)
        module = way.tiled(net, folder)
    made = OPTIMIZERS[optimizer](net.parameters())
    made.load_state_dict(world.optimizer.state_dict())
    return World(net, module, made)


def open_in(folder: Path) -> int:
    """How many descriptors of this process are of files in a folder, also of those that have lost their names."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
        except FileNotFoundError:
            continue
    return found


LEVELS = st.sampled_from(["device", "host", "disk"])
GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def several(what: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(what, min_size=1, max_size=4).map(tuple)


PLACED = st.builds(
    Way,
    tiles=GRIDS,
    backward_tiles=GRIDS,
    tiers=several(LEVELS),
    parameters=several(LEVELS),
    ahead=several(st.booleans()),
    fetched_ahead=st.booleans(),
    drop=several(st.sampled_from([0, 0, 1])),
)
BUDGETED = st.builds(Way, budget=st.integers(70, 200).map(lambda n: 1024 * n), calls=st.sampled_from([1, 2]))
#: Planning takes a second.
WAYS = st.one_of(*[PLACED] * 7, BUDGETED)


def loss(out: Tensor, seed: int) -> Tensor:
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
    return (out * weights).sum() + out.square().mean()


@contextmanager
def refusing(name: str, after: int, all_calls: list[int]) -> Iterator[None]:
    """A disk on which a call of the system fails from the n-th on; it is counted how many there are, with others."""
    right, here = getattr(os, name), itertools.count(1)

    def counted(*arguments: Any) -> Any:
        all_calls[0] += 1
        if next(here) > after:
            number = errno.EIO if name == "preadv" else errno.ENOSPC
            raise OSError(number, os.strerror(number))
        return right(*arguments)

    with mock.patch.object(os, name, counted):
        yield
