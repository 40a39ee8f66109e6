"""Parameters that live below the device, and the cost of their copies; see [Note: streamed] in `residency.homes`.

The search is given one *share* of the parameters after the other, from none to all, until it finds a plan: nothing is
streamed where all fits. A share is spread evenly over the network, so that the copies for one segment have the time of
several to arrive. A parameter's gradient and the optimizer's state for it live where it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lightning_plugin.chain import chains
from lightning_plugin.execute.streams import find_derived
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import Captured, Spread, VectorOp, accumulation_dtype
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.lower import LowerTiers, beside_parameters, one_way, weight_on_host
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.overhead import memoized
from lightning_plugin.residency.disk import fills_its_memory

#: Smaller tensors, in bytes, stay on the device: they take no room, and a call each to be fetched.
LEAST = 1 << 16
#: The shares of the parameters that are tried, in order.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Streamed:
    """The captured tensors that live below the device, by the places of their nodes."""

    on_host: tuple[int, ...] = ()
    on_disk: tuple[int, ...] = ()

    @property
    def all(self) -> frozenset[int]:
        return frozenset({*self.on_host, *self.on_disk})


def streamed_sets(network: Network, lower: LowerTiers) -> list[Streamed]:
    """Sets of parameters that may live below, share by share; each contains those that live there already."""
    may = list(streamable(network)) if lower.parameters else []
    sizes = {place: network.resident_bytes(network.nodes[place].outputs[0]) for place in may}
    found: dict[Streamed, None] = {}
    for share in SHARES:
        chosen, wanted, got = [], 0.0, 0
        for place in may:
            wanted += share * sizes[place]
            if got + sizes[place] / 2 <= wanted:
                chosen.append(place)
                got += sizes[place]
        streamed = tiers(network, lower, chosen)
        if streamed is not None:
            found[streamed] = None
    return list(found)


def tiers(network: Network, lower: LowerTiers, chosen: Iterable[int]) -> Streamed | None:
    """The tiers of chosen parameters and of those that live below already, the host first; None if there is no room."""
    used, on = 0, {"host": list[int](), "disk": list[int]()}
    before = {place: tier for place in captured(network) if (tier := network.tier_of(network.nodes[place].outputs[0]))}
    for place in sorted({*chosen, *before}):
        size = weight_on_host(network, place)
        tier = before.get(place) or lower.tier_of_parameter(used, size)
        if tier is None:
            return None
        used += size if tier == "host" else 0
        on[tier].append(place)
    return Streamed(tuple(on["host"]), tuple(on["disk"]))


def captured(network: Network) -> Iterator[int]:
    """Places of the nodes of captured tensors."""
    captures = network.recording.bindings.captures
    return (i for i, n in enumerate(network.nodes) if isinstance(n.op, Captured) and n.outputs[0] in captures)


def streamable(network: Network, least: int = LEAST) -> Iterator[int]:
    """Places of parameters that may be streamed: those of some size, alone in their memory, that are not written while
    the network runs, and from which no map is made that lasts. A tensor that each call computes is on the device before
    it could leave it."""
    captures = network.recording.bindings.captures
    lasting = sources_of_spread_maps(network.nodes)
    for place in captured(network):
        v = network.nodes[place].outputs[0]
        capture = captures[v]
        if (
            v.bytes >= least
            and capture.version is not None
            and isinstance(capture.tensor, nn.Parameter)
            and v not in lasting
            and fills_its_memory(capture.tensor)
        ):
            yield place


class Copies:
    """Bytes and transfer time of the copies of streamed tensors, interval by interval. Copies that are fetched
    ``ahead`` come during the interval before, beside its own."""

    def __init__(self, network: Network, streamed: Streamed, rates: Rates, ahead: bool = False) -> None:
        self.network = network
        self.streamed = streamed
        self.ahead = ahead
        self.rates = rates
        values = {network.nodes[place].outputs[0]: "host" for place in streamed.on_host}
        self.tiers = values | {network.nodes[place].outputs[0]: "disk" for place in streamed.on_disk}
        self.freed = sum(map(network.resident_bytes, self.tiers))
        self.lower = beside_parameters(network, streamed.on_host)

    @cached_property
    def of_node(self) -> dict[int, frozenset[Value]]:
        """Streamed tensors that each node needs, and vectors that are made of them."""
        tensors = {v: self.network.recording.bindings.captures[v].tensor for v in self.tiers}
        served = {*tensors, *find_derived(tensors, self.network.nodes)}
        return {n.serial: frozenset(closure(n.vectors, served)) for n in self.network.order}

    @memoized
    def used(self, begin: int, end: int) -> frozenset[Value]:
        """Streamed tensors that an interval needs, and vectors that are made of them."""
        return frozenset().union(*(self.of_node[n.serial] for n in self.network.order[begin:end]))

    @memoized
    def flight(self, begin: int, end: int) -> int:
        """Bytes of a tiled interval's copies and of their gradients, which are added up in a wider type. The copies for
        the next interval are taken to be as many."""
        if not self.tiers:
            return 0
        return sum(self.in_flight(v, accumulation_dtype(v.dtype).itemsize) for v in self.used(begin, end))

    def in_flight(self, v: Value, gradient: int) -> int:
        """Bytes of a copy, of its gradient at ``gradient`` bytes a number, and of the next copy if it is fetched
        ahead."""
        there = v.bytes * (2 if self.ahead else 1)
        return there + (v.bytes // v.dtype.itemsize * gradient if v.requires_grad else 0)

    def copied(self, begin: int, end: int) -> int:
        """Bytes that an interval fetches in a pass."""
        return sum(v.bytes for v in self.used(begin, end) if v in self.tiers) if self.tiers else 0

    def traffic(self, intervals: Iterable[tuple[int, int]]) -> int:
        """Bytes of transfers in a step: each pass fetches its copies, and gradients go back."""
        trains = self.network.trains
        return sum(
            v.bytes * (1 + trains + v.requires_grad)
            for begin, end in intervals
            for v in (self.used(begin, end) if self.tiers else ())
            if v in self.tiers
        )

    @memoized
    def flight_of_kept(self, begin: int, end: int) -> int:
        """The same as `flight` for a kept interval: its nodes have their copies one after the other."""
        if not self.tiers:
            return 0
        nodes = (self.used(i, i + 1) for i in range(begin, end))
        return max(sum(self.in_flight(v, v.dtype.itemsize) for v in used) for used in nodes)

    @memoized
    def transfers(self, begin: int, end: int) -> tuple[float, float]:
        """Seconds of an interval's transfers: of its copies in forward; of its copies and their gradients in
        backward."""
        found = [(v, self.tiers[v]) for v in (self.used(begin, end) if self.tiers else ()) if v in self.tiers]
        forward = sum(one_way(self.rates, tier, v.bytes) for v, tier in found)
        return forward, forward + sum(one_way(self.rates, tier, v.bytes) for v, tier in found if v.requires_grad)

    def waiting(self, begin: int, end: int, forward: float, backward: float | None) -> float:
        """Seconds that an interval of ``forward`` and ``backward`` seconds waits for copies."""
        if not self.tiers:
            return 0.0
        there, back = self.transfers(begin, end)
        if not self.ahead:
            return there + (0.0 if backward is None else back)
        return max(0.0, there - forward) + (0.0 if backward is None else max(0.0, back - backward))


def closure(values: Iterable[Value], served: set[Value]) -> Iterator[Value]:
    """The ``served`` ones among some vectors, and all that they are made of."""
    stack = list(values)
    while stack:
        v = stack.pop()
        if v in served:
            yield v
            if v.node is not None and isinstance(v.node.op, VectorOp):
                stack += v.node.inputs


def sources_of_spread_maps(nodes: Sequence[Node]) -> frozenset[Value]:
    """Vectors from which maps are made that last, in links too, and all that these are made of."""
    found: set[Value] = set()
    stack = [v for n in nodes if isinstance(n.op, Spread) for v in n.inputs]
    for _, node, op in chains(nodes):
        inside = sources_of_spread_maps(op.body.nodes)
        places = [i for i, v in enumerate(op.body.own) if v in inside]
        stack += [own[i] for own in (op.own(node, k) for k in range(op.count)) for i in places]
    while stack:
        v = stack.pop()
        if v not in found:
            found.add(v)
            if v.node is not None and isinstance(v.node.op, VectorOp):
                stack += v.node.inputs
    return frozenset(found)
