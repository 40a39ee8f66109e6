"""Lower tiers: the room there, the maps that a plan has offloaded segment by segment, and transfer times.

[Note: hosted] The host holds each offloaded map from where it is made until backward has used it, and the cotangents of
some: while a segment is pulled back, those of its outputs are complete, and those of its inputs are accumulated. So the
host holds most while a segment with an offloaded map is pulled back: all maps so far, and the cotangents at both ends.
Parameters that live on the host are there all the time. Where several calls of a step wait for one backward, each holds
its own maps, and one is pulled back at a time.

[Note: files] A map on the disk is a file, and the system keeps the files written last in memory, beside the memory that
the budget counts: as long as all files together are no larger than `Rates.cache`, no transfer touches the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_plugin.graph import Value
from lightning_plugin.memory import machine_memory
from lightning_plugin.options import Options
from lightning_plugin.planner.analysis.network import Network, cotangent_bytes, is_given
from lightning_plugin.planner.costs.rates import Rates, is_here

#: Host memory for what does not fit the device, where the user does not say; no more than half of what there is.
HOST = 64 * 2**30


@dataclass(frozen=True)
class LowerTiers:
    """The tiers below the device.

    Attributes:
        host: Bytes that the host may hold; None if there is no host below the device.
        disk: The disk may be used.
        half: Maps may be offloaded as bfloat16, which loses digits.
        half_on_device: Maps that stay on the device are stored as bfloat16, too.
        calls: The number of calls of a step whose maps are offloaded at once.
        parameters: The tiers on which parameters may live.
    """

    host: int | None = None
    disk: bool = True
    half: bool = False
    half_on_device: bool = False
    calls: int = 1
    parameters: tuple[str, ...] = ()

    def tier_of_parameter(self, used: int, size: int) -> str | None:
        """The tier of the next parameter that leaves the device, with its gradient and the optimizer's state."""
        fits = {"host": self.host is None or used + size <= self.host, "disk": True}
        return next((tier for tier in self.parameters if fits[tier]), None)

    def tier(self, used: int, size: int) -> str | None:
        """The tier of the next map that leaves the device."""
        if self.host is not None and used + size <= self.host:
            return "host"
        return "disk" if self.disk else None

    def size_on_device(self, maps: Sequence[Value]) -> int:
        """Bytes of stored maps that stay on the device."""
        return self.size(maps) if self.half_on_device else sum(v.bytes for v in maps)

    def sizes(self, maps: Iterable[Value]) -> dict[Value, int]:
        """Bytes of each map on a lower tier."""
        return {v: v.bytes * 2 // v.dtype.itemsize if self.half and v.dtype.itemsize > 2 else v.bytes for v in maps}

    def size(self, maps: Iterable[Value]) -> int:
        """Bytes of all maps on a lower tier."""
        return sum(self.sizes(maps).values())

    @property
    def there(self) -> str:
        """The tier that maps come back from."""
        return "host" if self.host else "disk"


def pinned(size: int) -> int:
    """Bytes of pinned memory that PyTorch's allocator takes for a tensor: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def one_way(rates: Rates, tier: str, size: int) -> float:
    """Seconds of a transfer to a lower tier, or from there."""
    return size / (rates.host if tier == "host" else rates.disk)


def lower_tiers(device: str | None, options: Options) -> LowerTiers:
    """The tiers below the device that a user allows: a CPU has no host below it."""
    most = min(HOST, machine_memory() // 2) if device is not None and is_here(device) else HOST
    host = most if options.host_budget is None else options.host_budget
    alone = device is None or device.split(":")[0] == "cpu"
    there = {"host": not alone and host > 0, "disk": bool(options.disk)}
    parameters = {
        "auto": tuple(tier for tier, is_there in there.items() if is_there),
        "device": (),
        "host": ("host",),
        "disk": ("disk",),
    }
    return LowerTiers(
        None if alone else host,
        bool(options.disk),
        bool(options.half),
        options.half == "device",
        options.calls,
        parameters[options.parameters],
    )


@dataclass(frozen=True)
class LowerMaps:
    """Offloaded maps up to a place in the network.

    Attributes:
        host: Maps on the host that are alive.
        host_bytes: Bytes of all maps that were put on the host.
        disk_bytes: Bytes of all maps that were put on the disk.
        parameter_bytes: Bytes of parameters on the host, with their gradients and the optimizer's state, in the blocks
            that the allocator takes for them.
    """

    host: frozenset[Value] = frozenset()
    host_bytes: int = 0
    disk_bytes: int = 0
    parameter_bytes: int = 0

    def with_maps(self, tier: str, maps: frozenset[Value], size: int) -> LowerMaps:
        """With the maps that one more segment puts on a tier."""
        if tier == "host":
            taken = pinned(size) if len(maps) == 1 else 2 * size  # of several maps, at most
            return replace(self, host=self.host | maps, host_bytes=self.host_bytes + taken)
        return replace(self, disk_bytes=self.disk_bytes + size) if tier == "disk" else self

    def at(self, alive: frozenset[Value]) -> LowerMaps:
        """The same at another place, where these maps are alive: the others stay until backward has used them."""
        host = self.host & alive
        return self if host == self.host else replace(self, host=host)


NO_MAPS = LowerMaps()


def beside_parameters(network: Network, places: Iterable[int]) -> LowerMaps:
    """No maps yet, beside the parameters that live on the host, by the places of their nodes."""
    return LowerMaps(parameter_bytes=sum(weight_on_host(network, place) for place in places))


def weight_on_host(network: Network, place: int) -> int:
    """Bytes of the blocks on the host for a parameter, its gradient and the optimizer's state."""
    v = network.nodes[place].outputs[0]
    return network.resident_bytes(v) * pinned(v.bytes) // max(1, v.bytes)


def tier_of(
    lower: LowerTiers, before: LowerMaps, maps: frozenset[Value], size: int, network: Network, begin: int, end: int
) -> str | None:
    """The tier for the maps of an interval that leave the device: the host, if it has room for them beside all maps
    that are there and the cotangents at both ends, else the disk, if there is one."""
    if lower.host is None:
        return lower.tier(0, 0)
    after = before.with_maps("host", maps, size)
    ends = {v for cut in (begin, end) for v in network.alive[cut] if v in after.host and not is_given(v)}
    cotangents = sum(pinned(cotangent_bytes([v])) for v in ends) if network.trains else 0
    return lower.tier(after.parameter_bytes + lower.calls * after.host_bytes, cotangents)


@dataclass(slots=True)
class TransferTime:
    """Seconds of transfers.

    A file in the system's memory is copied by the processor. On a CPU whose threads all compute, that time adds to
    theirs.

    Attributes:
        busy: Seconds in which the processors that compute make the transfer.
        beside: Seconds in which others do, so that it can overlap with the work on other tiles.
    """

    busy: float = 0.0
    beside: float = 0.0

    def __add__(self, other: TransferTime) -> TransferTime:
        return TransferTime(self.busy + other.busy, self.beside + other.beside)

    def times(self, count: int) -> TransferTime:
        return TransferTime(count * self.busy, count * self.beside)

    def with_work(self, work: float, ahead: bool) -> float:
        """Seconds of a pass with ``work`` seconds of its own and these transfers, which overlap if they go
        ``ahead``."""
        return self.busy + (max(work, self.beside) if ahead else work + self.beside)


#: No transfers.
NONE = TransferTime()


def offload_time(rates: Rates, before: LowerMaps, tier: str, size: int) -> TransferTime:
    """Transfer time of ``size`` bytes of maps to a tier that holds those of ``before``."""
    if tier == "host":
        return TransferTime(beside=size / rates.host)
    cached = min(size, max(0, rates.cache - before.disk_bytes))
    return TransferTime(cached / rates.file, (size - cached) / rates.disk)


def fetch_time(rates: Rates, there: LowerMaps, sizes: Mapping[Value, int]) -> TransferTime:
    """Transfer time of maps, whose bytes are known, from the tiers they are on."""
    host = sum(size for key, size in sizes.items() if key in there.host)
    disk = sum(sizes.values()) - host
    cached = disk * min(1.0, rates.cache / max(1, there.disk_bytes))
    return TransferTime(cached / rates.file, host / rates.host + (disk - cached) / rates.disk)
