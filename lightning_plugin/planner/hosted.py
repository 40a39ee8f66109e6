"""Maps in the host's memory, below the device.

[Note: hosted] The host holds each map that is put there from where it is made until backward has used it, and the
gradients of some: while a segment is pulled back, those of what is alive at its end are complete, and those of what is
alive at its beginning are collected. So it holds most while a segment that has put a map there is pulled back: all maps
so far, and the cotangents at both ends. Parameters that live on the host are there all the time. Where several calls of
a step wait for one backward, each holds its own maps, and one is pulled back at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_plugin.graph import Value
from lightning_plugin.planner.lower import Lower, one_way
from lightning_plugin.planner.network import Network, cotangent_bytes, is_given
from lightning_plugin.planner.rates import Rates


@dataclass(frozen=True)
class Hosted:
    """The maps on the host that are alive, by identity, and the bytes of all that are there; and those of parameters,
    with what goes with them."""

    maps: frozenset[int] = frozenset()
    bytes: int = 0
    parameters: int = 0

    def more(self, maps: frozenset[int], size: int) -> Hosted:
        """With what one more segment puts there."""
        return replace(self, maps=self.maps | maps, bytes=self.bytes + size)

    def at(self, alive: frozenset[int]) -> Hosted:
        """The same where these maps are alive: the others stay until backward has used them."""
        maps = self.maps & alive
        return self if maps == self.maps else replace(self, maps=maps)


NOTHING = Hosted()


def beside_parameters(network: Network, places: Iterable[int]) -> Hosted:
    """Nothing yet, beside the parameters that live on the host, by the places of their nodes."""
    return Hosted(parameters=sum(network.weight(network.nodes[place].outputs[0]) for place in places))


def tier_of(lower: Lower, after: Hosted, network: Network, begin: int, end: int) -> str | None:
    """Where the maps of an interval go that leave the device: to the host, if there is room for all that is there
    ``after`` with the cotangents at both ends, else to the disk, if there is one."""
    if lower.host is None:
        return lower.tier(0, 0)
    ends = {v for cut in (begin, end) for v in network.alive[cut] if id(v) in after.maps and not is_given(v)}
    cotangents = cotangent_bytes(ends) if network.trains else 0
    return lower.tier(after.parameters + lower.calls * after.bytes, cotangents)


def way_back(rates: Rates, lower: Lower, hosted: Hosted, maps: Sequence[Value]) -> float:
    """Seconds that maps take from where they lie below the device."""
    here = [v for v in maps if id(v) in hosted.maps]
    there = [v for v in maps if id(v) not in hosted.maps]
    return one_way(rates, "host", lower.size(here)) + one_way(rates, "disk", lower.size(there))
