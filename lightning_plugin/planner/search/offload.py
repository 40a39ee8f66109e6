"""Where an order is cut so that no waiting comes of sending what is stored: HMMS's Algorithm 1 in this engine's words.

[Note: offload] Going through the operators in order, a balance is kept: what the operators' own time allows to be sent
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

from lightning_plugin.graph import Node, Value
from lightning_plugin.planner.analysis.network import Network, is_given


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
