"""Policies: restrictions of the search to some plans; and the places where the order may be cut.

Without one the search may choose any plan. Published techniques are restrictions (`benchmarks.published`), so that they
can be compared at the same budget on the same network, and so that the unrestricted search is never worse as far as the
cost model knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_plugin.options import SPLIT_HALOS
from lightning_plugin.plan import HALOS
from lightning_plugin.planner.analysis.network import Network, is_given
from lightning_plugin.program.fixed import is_entire
from lightning_plugin.program.program import needs_no_result


@dataclass(frozen=True)
class Policy:
    """Allowed plans.

    Attributes:
        cuts: Everywhere, only where a statistic forces one, or there and at places that a function of the `Search`
            returns.
        shape: Tiles, rows of tiles or whole maps.
        halos: Ways to get the rows between neighbouring tiles.
        keep: Segments may be kept: run whole, with the memory that backward needs.
        offload: Maps may go to lower tiers; "all": every map that can be offloaded is.
        drop: The depth to which stored maps may be dropped (`execute.function`).
        recall: Backward may read stored maps back (`program.program`).
        same: A segment's forward and backward have one grid.
    """

    cuts: Literal["all", "stages"] | Callable[[Any], Iterable[int]] = "all"
    shape: Literal["tiles", "rows", "whole"] = "tiles"
    halos: tuple[str, ...] = HALOS
    keep: bool = True
    offload: bool | Literal["all"] = True
    drop: int = 3
    recall: bool = True
    same: bool = False


#: No restriction.
AUTO = Policy()


def with_halo(policy: Policy, halo: str) -> Policy:
    """A policy with the user's halo. Splits leave halos that are computed twice."""
    if halo == "auto":
        return policy
    if halo in SPLIT_HALOS:
        return replace(policy, halos=("recompute",))
    if halo not in HALOS:
        raise ValueError(f"halo is one of 'auto', {', '.join(map(repr, (*HALOS, *SPLIT_HALOS)))}, not {halo!r}")
    return replace(policy, halos=(halo,))


# Cuts -------------------------------------------------------------------------------------------------------


def forced_cuts(network: Network) -> set[int]:
    """The ends of the order, and every change of stage: cuts that every plan has."""
    order, stage = network.order, network.stage
    end = len(order)
    return {0, end} | {i for i in range(1, end) if stage[order[i].serial] != stage[order[i - 1].serial]}


def low_memory_cuts(network: Network, must: set[int]) -> list[int]:
    """Cuts inside stages where little is alive."""
    alive, size = network.alive, bytes_alive(network)
    return [
        i
        for i in range(1, len(network.order))
        if i not in must
        and not any(map(is_entire, alive[i]))
        and size[i] <= size[i - 1]
        and (size[i] < size[i + 1] or (size[i] <= size[i + 1] and starts_heavy_work(network, i)))
    ]


def with_unread(network: Network, cuts: Sequence[int], must: set[int]) -> set[int]:
    """Cuts with those behind operators that are pulled back without their results, if only cheap operators lie between:
    in place of the first if no more is alive there, else beside it. See [Note: unread] in `rules.unread`."""
    size, found = bytes_alive(network), set(cuts)
    for cut in cuts if network.trains else ():
        unread = unread_before(network, cut, must)
        if unread is not None:
            found.add(unread)
            if size[unread] <= size[cut]:
                found.discard(cut)
    return found


def unread_before(network: Network, cut: int, must: set[int]) -> int | None:
    """The nearest place before a cut where a segment may end with a result that its backward does not need."""
    for i in range(cut, 0, -1):
        made = network.order[i - 1]
        if i in must:
            break
        if made.outputs[0].requires_grad and needs_no_result(made):
            return i
        if network.profiles[made.serial].flops:
            break
    return None


def bytes_alive(network: Network) -> list[int]:
    """Bytes that are alive at each place, beside the network's inputs."""
    return [sum(v.bytes for v in maps if not is_given(v)) for maps in network.alive]


def starts_heavy_work(network: Network, cut: int) -> bool:
    """True if real work begins at a cut; a cut before an activation would only store a result of less."""
    return network.order[cut].op.kind in ("window", "resample")
