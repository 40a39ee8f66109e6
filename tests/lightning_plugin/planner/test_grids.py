"""Grids are asked for in the order of their seconds, also where most of them are not looked at."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.grids import Choice, Price
from lightning_plugin.planner.costs.rates import rates_of
from lightning_plugin.planner.search.interval import Intervals, Where
from lightning_plugin.planner.search.policies import AUTO
from lightning_plugin.rules.uncut import Uncut
from tests.zoo import ZOO

#: How many intervals of each network.
INTERVALS = 6
#: A network that picks instances by their values, and so is not recorded without pixels.
PICKS = "mil_class_attention"


def larger(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape whose maps may be cut into many tiles."""
    batch, channels, *sides = shape
    return (batch, channels, *(side * (2 if len(sides) > 2 else 8) for side in sides))


def choices(network: Network, device: str, draw: random.Random) -> Iterator[tuple[str, Choice, Price]]:
    """The grids of some intervals, forward and backward."""
    intervals = Intervals(network, rates_of(device), AUTO)
    stages = [network.stage[n.serial] for n in network.order]
    for _ in range(INTERVALS):
        begin = draw.randrange(len(stages))
        last = max(i for i, stage in enumerate(stages) if stage == stages[begin])
        end = draw.randint(begin, last) + 1
        if intervals.program(begin, end) is None:
            continue
        for backward in (False, True):
            yield f"{begin} to {end}, {backward}", *intervals.choice_of(Where(begin, end), backward)


@pytest.mark.parametrize("name", sorted(ZOO.keys() - {PICKS}))
def test_grids_come_in_the_order_of_their_seconds(name: str) -> None:
    entry = ZOO[name]
    draw = random.Random(name)
    with recorded(entry.build().train(), larger(entry.shape), torch.float32) as (network, _):
        for device in ("cpu", "cuda:a100"):
            for where, choice, price in choices(network, device, draw):
                place = draw.randrange(len(choice.grids))
                given = list(choice.from_(place, price))
                every = sorted(choice.grids[place:], key=price.seconds)
                assert given == every, (device, where)


def test_most_grids_are_not_looked_at() -> None:
    """Where bytes cost the same everywhere, the first grid is known to be the cheapest by looking at it."""
    with recorded(ZOO["vgg16"].build().train(), (1, 3, 512, 480), torch.float32) as (network, _):
        intervals = Intervals(network, rates_of("cuda:a100"), AUTO)
        choice, price = intervals.choice_of(Where(0, 6), True)
        assert next(choice.from_(0, price)) == choice.grids[0]
        assert len(choice.floors) == 1 < len(choice.grids)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).flatten(2).transpose(1, 2)[:, None]
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)


def test_seconds_of_grids_do_not_depend_on_what_was_asked_before() -> None:
    """An interval that reads keys in pieces makes more calls than one that reads them whole, and no other's are its
    own."""
    with recorded(Attends(), (1, 4, 64, 64), torch.float32) as (network, _):
        begin, end = min(i for i, n in enumerate(network.order) if isinstance(n.op, Uncut)), max(network.key_cuts)
        ways = Where(begin, end), Where(begin, end, pieces=4)
        seconds: list[list[float]] = []
        for before in ways:
            intervals = Intervals(network, rates_of("cpu"), AUTO)
            grids = intervals.grids(begin, end, False)
            prices = [intervals.choice_of(where, True)[1] for where in ways]
            intervals.cost(before, grids[0], True)
            seconds.append([price.seconds(grids[-1]) for price in prices])
        assert seconds[0] == seconds[1]
        assert seconds[0][0] < seconds[0][1]
