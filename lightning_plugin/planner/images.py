"""Stages in which every image is on its own.

[Note: images] Where no operator of a stage mixes images, a tile may hold a few whole images through all of it: however
long the stage is, there is no halo, and nothing has to be stored inside. Where one image through the whole stage takes
little of the budget, the search tries few cuts inside it, and segments of any length: a chain of forty transformer
blocks is planned like one of four.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_plugin.boxes import Box, Grid, reference_of
from lightning_plugin.graph import Node
from lightning_plugin.ops import ReduceOp, TileOp
from lightning_plugin.planner.interval import Intervals, Where
from lightning_plugin.planner.network import Network

#: One image may take this part of a budget.
PART = 1 / 4
#: So many cuts are tried inside a stage.
CUTS = 7


def stages_of(network: Network) -> dict[int, tuple[int, int]]:
    """Where each stage begins and ends in the order."""
    found: dict[int, tuple[int, int]] = {}
    for i, node in enumerate(network.order):
        stage = network.stage[node.serial]
        found[stage] = found.get(stage, (i, i))[0], i + 1
    return found


def on_their_own(nodes: Sequence[Node], space: int) -> bool:
    """Whether every operator, to make some of the images, needs these alone."""
    return all(alone(node, space) for node in nodes)


def alone(node: Node, space: int) -> bool:
    op = node.op
    assert isinstance(op, (TileOp, ReduceOp))
    made = node.maps[0].space.extent if isinstance(op, ReduceOp) else node.outputs[0].space.extent
    if len(made) <= space or all(size == 1 for size in made[space:]):
        return False
    whole = Box.whole(made)
    one = Box.of((0, size) if a < space else (size - 1, size) for a, size in enumerate(made))
    for v, wanted, all_of_it in zip(node.maps, op.need(one), op.need(whole), strict=True):
        for a, size in enumerate(v.space.extent[space:], space):
            own = -(-size // made[a])  # heads, say, may count among images
            if size > 1 and (wanted.hi[a] - wanted.lo[a] > own or all_of_it.hi[a] != size):
                return False
    return True


def free_stages(intervals: Intervals, room: int) -> dict[int, tuple[int, int]]:
    """The stages in which images are on their own, and one of which takes little of the room."""
    network = intervals.network
    space = intervals.space
    if space is None:
        return {}
    found = {}
    for stage, (begin, end) in stages_of(network).items():
        program = intervals.program(begin, end)
        if program is None or not on_their_own(network.order[begin:end], space):
            continue
        reference = reference_of([t.map.space.extent for t in program.targets])
        grid = Grid((*(1 for _ in reference[:space]), *reference[space:]))
        if intervals.middle(Where(begin, end), grid, network.trains) <= PART * room:
            found[stage] = begin, end
    return found


def few(cuts: Sequence[int], size: Sequence[int]) -> list[int]:
    """Some of the cuts inside a stage, at the least bytes and evenly apart."""
    if not cuts:
        return []
    least = min(size[i] for i in cuts)
    small = [i for i in cuts if size[i] <= 1.01 * least]
    step = max(1, -(-len(small) // CUTS))
    return small[step - 1 :: step]
