"""The seconds of a grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.peak import TiledInterval
from lightning_plugin.planner.costs.rates import rates_of
from lightning_plugin.planner.search.interval import Intervals
from lightning_plugin.planner.search.policies import AUTO
from lightning_plugin.rules.uncut import Uncut


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
        ways = TiledInterval(begin, end), TiledInterval(begin, end, pieces=4)
        seconds: list[list[float]] = []
        for before in ways:
            intervals = Intervals(network, rates_of("cpu"), AUTO)
            grids = intervals.grids(begin, end, False)
            intervals.cost(before, grids[0], True)
            seconds.append([intervals.pass_cost(begin, end, way.pieces, False, grids[-1], True)[0] for way in ways])
        assert seconds[0] == seconds[1]
        assert seconds[0][0] < seconds[0][1]


def test_grids_for_background_have_as_many_tiles_as_the_others() -> None:
    """Each is compared tile by tile with the known parts of the image."""
    with recorded(nn.Conv2d(3, 2, 3), (1, 3, 100_000, 80_000), torch.float32) as (network, _):
        intervals = Intervals(network, rates_of("cpu"), AUTO)
        plain, nested = (intervals.grids(0, len(network.order), background) for background in (False, True))
    assert max(grid.tiles for grid in nested) <= 4 * max(grid.tiles for grid in plain)
    assert len(nested) > 5 and min(grid.tiles for grid in nested) == 1
