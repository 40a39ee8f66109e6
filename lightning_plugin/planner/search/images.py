"""Stages in which every instance is on its own.

[Note: images] Where no operator of a stage mixes the positions of an axis (the images of a batch, the patches of a
bag or of an image), a tile may hold a few of them through all of it: however long the stage is, there is no halo, and
nothing has to be stored inside. Where one position through the whole stage takes little of the budget, the search tries
few cuts inside it, and segments of any length: a chain of forty transformer blocks is planned like one of four.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_plugin.boxes import Grid
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.tiles import carried
from lightning_plugin.planner.search.interval import Intervals, Where

#: One position may take this part of a budget.
PART = 1 / 4
#: So many cuts are tried inside a stage, where there would be more than so many.
CUTS, MANY = 7, 16


def stages_of(network: Network) -> dict[int, tuple[int, int]]:
    """Where each stage begins and ends in the order."""
    found: dict[int, tuple[int, int]] = {}
    for i, node in enumerate(network.order):
        stage = network.stage[node.serial]
        found[stage] = found.get(stage, (i, i))[0], i + 1
    return found


def free_stages(intervals: Intervals, room: int) -> dict[int, tuple[int, int]]:
    """The stages in which instances are on their own, and one of which takes little of the room."""
    network = intervals.network
    found = {}
    for stage, (begin, end) in stages_of(network).items():
        program = intervals.program(begin, end)
        axes = carried(network.order[begin:end]) if program is not None else frozenset()
        if program is None or not axes:
            continue
        grid = Grid(tuple(size if a in axes else 1 for a, size in enumerate(program.reference)))
        if grid.tiles > 1 and intervals.middle(Where(begin, end), grid, network.trains) <= PART * room:
            found[stage] = begin, end
    return found


def few(cuts: Sequence[int], size: Sequence[int]) -> list[int]:
    """Some of the cuts inside a stage, where there are many: at the least bytes and evenly apart."""
    if len(cuts) <= MANY:
        return list(cuts)
    least = min(size[i] for i in cuts)
    small = [i for i in cuts if size[i] <= 1.01 * least]
    step = max(1, -(-len(small) // CUTS))
    return small[step - 1 :: step]
