"""Where the order may be cut."""

from __future__ import annotations

from lightning_plugin.planner.network import Network, is_given
from lightning_plugin.program.fixed import is_entire

#: Cuts inside stages that are considered; of more, those where least is alive.
MOST_CUTS = 48


def changes(network: Network) -> set[int]:
    """The ends of the order, and every change of stage: cuts that every plan has."""
    order, stage = network.order, network.stage
    end = len(order)
    return {0, end} | {i for i in range(1, end) if stage[order[i].serial] != stage[order[i - 1].serial]}


def valleys(network: Network, must: set[int]) -> list[int]:
    """Cuts inside stages where little is alive."""
    alive, size = network.alive, sizes(network)
    found = [
        i
        for i in range(1, len(network.order))
        if i not in must
        and not any(map(is_entire, alive[i]))
        and size[i] <= size[i - 1]
        and (size[i] < size[i + 1] or (size[i] <= size[i + 1] and heavy(network, i)))
    ]
    return sorted(found, key=lambda i: size[i])[:MOST_CUTS] if len(found) > MOST_CUTS else found


def sizes(network: Network) -> list[int]:
    """The bytes that are alive at each place, beside what was given."""
    return [sum(v.bytes for v in maps if not is_given(v)) for maps in network.alive]


def heavy(network: Network, cut: int) -> bool:
    """Whether real work begins at a cut; a cut before an activation would only store what follows from less."""
    return network.order[cut].op.kind in ("window", "resample")
