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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lightning_plugin.graph import Node, Value
from lightning_plugin.planner.analysis.network import Network, is_given
from lightning_plugin.planner.costs.lower import one_way
from lightning_plugin.planner.search.cuts import Cuts
from lightning_plugin.planner.search.policies import AUTO, Policy


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


def paid_for(cuts: Cuts) -> Iterator[int]:
    """The cuts of an order whose transfers are paid for."""

    def transfer(maps: Sequence[Value]) -> float:
        return one_way(cuts.rates, cuts.lower.there, cuts.lower.size(maps))

    return paid(cuts.network, cuts.intervals.once, transfer)


ONE = ("recompute",)
#: Nothing is sent to lower tiers, dropped or read back.
plainly = partial(Policy, spill=False, drop=0, recall=False)

POLICIES: dict[str, Policy] = {
    "auto": AUTO,
    # Everything from one statistic to the next fused, each segment on one grid. Not what SFT does, which fuses and
    # tiles only maps that do not fit into memory whole, and stores the others.
    "fused-stages": plainly(cuts="stages", halos=ONE, keep=False, same=True),
    # Rows with overlapping halos, with and without stored boundaries between (LR-CNN).
    "overl": plainly(cuts="stages", shape="rows", halos=ONE, keep=False),
    "overl-h": plainly(shape="rows", halos=ONE, keep=False),
    # Rows that hand boundary rows on, with and without stored boundaries between (LR-CNN).
    "2ps": plainly(cuts="stages", shape="rows", halos=("share",), keep=False),
    "2ps-h": plainly(shape="rows", halos=("share",), keep=False),
    # Everything goes to a lower tier while the device computes, and is cut where that costs no waiting (HMMS's
    # Algorithm 1; what differs is said above).
    "hmms": Policy(cuts=paid_for, halos=ONE, keep=False, spill="all", drop=0, recall=False),
    # torch.utils.checkpoint.checkpoint_sequential: whole segments, the last of them kept.
    "checkpoint_sequential": plainly(shape="whole", halos=ONE),
}
