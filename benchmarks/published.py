"""Published techniques, and what is simplest, as restrictions of the planner's search.

Where an order is cut so that no waiting comes of sending what is stored is HMMS's Algorithm 1 in this engine's words.
Going through the operators in order, a balance is kept: what the operators' own time allows to be sent
is added, what has to be sent is taken off. HMMS sends the input of every operator and frees what is on its way as soon
as the balance is not negative, and begins again at zero. Here too an operator's time pays for a transfer, a cut is made
at the first place where it has been paid for, and the balance begins again. What differs:

- HMMS saves the maps of all operators for backward and recomputes none. Here what is sent is what is stored at a cut,
  and the operators between two cuts run again in backward: so less has to be paid for, and more is computed.
- HMMS sends whole maps, or those of a split. Here a segment's tiles are sent while its next ones are computed, so that
  a map is on its way before it is whole.
- HMMS plans the way back by the same balance, from the end. Here backward fetches the next tile while it computes one.
- A statistic cuts the order whether the cut has been paid for or not. Where the cuts that are paid for do not keep the
  budget, there is no plan; HMMS has no budget.

SFT's plans are no restriction of the search: `sft` makes them as the paper's listings do. A map that does not fit into
a capacity has to be tiled (Listing 3, lines 2 to 4). The segment around it ends where all that is read later fits, so
that it can be a checkpoint (lines 10 to 18): it is fused and tiled, forward and backward by one grid, and computed
again in backward. Everything else runs whole and is saved. Listing 4, the sizes of a tile's inputs, is the engine's
own geometry. The paper leaves two things to its user, which are tried here in turn: the capacity, as large as it can
be, and the number of tiles, as small as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import nn

from lightning_plugin import BudgetError
from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.analysis.network import Network, is_given
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import with_rehearsed_memory
from lightning_plugin.planner.costs.lower import one_way
from lightning_plugin.planner.costs.rates import RATES, Rates
from lightning_plugin.planner.rehearsal.rehearse import rehearse
from lightning_plugin.planner.search.policies import AUTO, Policy, forced_cuts
from lightning_plugin.planner.search.predict import predict
from lightning_plugin.planner.search.search import Search


def paid(
    network: Network, seconds: Callable[[Node], float], transfer: Callable[[Sequence[Value]], float]
) -> Iterator[int]:
    """The cuts at which the operators since the last one have taken as long as what is stored there needs.

    ``seconds`` are those of an operator's forward, ``transfer`` those of maps on their way down.
    """
    balance = 0.0
    for cut in range(1, len(network.order)):
        balance += seconds(network.order[cut - 1])
        if network.stage[network.order[cut].serial] != network.stage[network.order[cut - 1].serial]:
            balance = 0.0
            continue
        leaving = [v for v in network.alive[cut] if not is_given(v)]
        if leaving and balance >= transfer(leaving):
            yield cut
            balance = 0.0


def paid_for(search: Search) -> Iterator[int]:
    """The cuts of an order whose transfers are paid for."""

    def transfer(maps: Sequence[Value]) -> float:
        return one_way(search.rates, search.lower.there, search.lower.size(maps))

    operators = search.intervals.cost_model.operators

    def seconds(node: Node) -> float:
        return float(operators.seconds(operators.rows([node]), np.ones(1), 1).sum())

    return paid(search.network, seconds, transfer)


ONE = ("recompute",)
#: Nothing is sent to lower tiers, dropped or read back.
plainly = partial(Policy, offload=False, drop=0, recall=False)

POLICIES: dict[str, Policy] = {
    "auto": AUTO,
    # Everything from one statistic to the next fused, each segment on one grid. `sft` fuses and tiles only maps
    # that do not fit.
    "fused-stages": plainly(cuts="stages", halos=ONE, keep=False, same=True),
    # Rows with overlapping halos, with and without stored boundaries between (LR-CNN).
    "overl": plainly(cuts="stages", shape="rows", halos=ONE, keep=False),
    "overl-h": plainly(shape="rows", halos=ONE, keep=False),
    # Rows that hand boundary rows on, with and without stored boundaries between (LR-CNN).
    "2ps": plainly(cuts="stages", shape="rows", halos=("share",), keep=False),
    "2ps-h": plainly(shape="rows", halos=("share",), keep=False),
    # Everything goes to a lower tier while the device computes, and is cut where that costs no waiting (HMMS's
    # Algorithm 1; what differs is said above).
    "hmms": Policy(cuts=paid_for, halos=ONE, keep=False, offload="all", drop=0, recall=False),
    # torch.utils.checkpoint.checkpoint_sequential: whole segments, the last of them kept.
    "checkpoint_sequential": plainly(shape="whole", halos=ONE),
}


#: Numbers of tiles on each axis that SFT's plans are tried with.
TILES = (2, 4, 8, 16, 32, 64)


def sft(
    module: nn.Module, shape: Sequence[int], budget: int, rates: Rates | None = None, dtype: torch.dtype = torch.float32
) -> Plan:
    """SFT's plan of a step within a budget.

    Raises:
        BudgetError: Neither a capacity nor a number of tiles keeps the budget.
    """
    least = None
    with recorded(module, shape, dtype) as (network, _):
        maps = {v.bytes for cut in network.alive for v in cut if not is_given(v)}
        for capacity in (max(maps) + 1, *sorted(maps, reverse=True)):
            before = None
            for count in TILES:
                plan = fused_and_tiled(network, capacity, count)
                plan = with_rehearsed_memory(plan, rehearse(plan, network))
                if plan.peak_bytes <= budget:
                    seconds = predict(plan, network, rates or RATES["cpu"])
                    return replace(plan, forecast=replace(plan.forecast, seconds=seconds), shape=tuple(shape))
                if before is not None and plan.peak_bytes >= before:
                    break  # more tiles hold more
                before = plan.peak_bytes
                least = min(least or before, before)
    raise BudgetError(f"SFT needs {least} bytes", least or 0)


def fused_and_tiled(network: Network, capacity: int, count: int) -> Plan:
    """Segments around the maps that a capacity is too small for, each in so many tiles on every axis of space."""
    order = network.order

    def fits(v: Value) -> bool:
        return is_given(v) or v.bytes < capacity

    checkpoints = {i for i in range(1, len(order)) if all(map(fits, network.alive[i]))}
    spans = list(pairwise(sorted(checkpoints | forced_cuts(network))))
    segments = []
    for whole, group in groupby(spans, lambda span: all(fits(v) for n in order[slice(*span)] for v in n.outputs)):
        parts = list(group)
        for begin, end in [(parts[0][0], parts[-1][1])] if whole else parts:
            nodes, read = order[begin:end], {*network.alive[end], *network.gathered}
            axes = len(nodes[0].maps[0].space.extent)
            space = axes if network.axes_of_space is None else network.axes_of_space
            grid = Grid((1,) * axes if whole else (count,) * space + (1,) * (axes - space))
            made = [n for n in nodes if whole or isinstance(n.op, ReduceOp) or n.outputs[0] in read]
            segments.append(SegmentPlan(tuple(network.place[n.serial] for n in made), grid, grid, keep=whole))
    return Plan(tuple(segments))
