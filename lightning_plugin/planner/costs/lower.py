"""The tiers below the device, as far as planning needs to know them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_plugin.graph import Value
from lightning_plugin.memory import machine_memory
from lightning_plugin.options import Options
from lightning_plugin.planner.costs.rates import Rates, is_here

#: Host memory for what does not fit the device, where the user does not say; no more than half of what there is.
HOST = 64 * 2**30


@dataclass(frozen=True)
class Lower:
    """The tiers below the device: how much the host may hold (None where there is no host below), and whether the disk
    may be used. ``half`` allows maps there to be kept as bfloat16, which loses digits. So many ``calls`` of a step have
    maps there at once. Parameters may live on the tiers ``parameters``."""

    host: int | None = None
    disk: bool = True
    half: bool = False
    calls: int = 1
    parameters: tuple[str, ...] = ()

    def tier_of_parameter(self, used: int, size: int) -> str | None:
        """Where the next parameter goes if it leaves the device, with all that goes with it."""
        fits = {"host": self.host is None or used + size <= self.host, "disk": True}
        return next((tier for tier in self.parameters if fits[tier]), None)

    def tier(self, used: int, size: int) -> str | None:
        """Where the next map goes if it leaves the device."""
        if self.host is not None and used + size <= self.host:
            return "host"
        return "disk" if self.disk else None

    def sizes(self, maps: Iterable[Value]) -> dict[Value, int]:
        """What each map takes on a lower tier."""
        return {v: v.bytes * 2 // v.dtype.itemsize if self.half and v.dtype.itemsize > 2 else v.bytes for v in maps}

    def size(self, maps: Iterable[Value]) -> int:
        """What maps take on a lower tier."""
        return sum(self.sizes(maps).values())

    @property
    def there(self) -> str:
        """The tier that maps come back from."""
        return "host" if self.host else "disk"


def pinned(size: int) -> int:
    """What PyTorch's allocator takes of pinned memory for a tensor of so many bytes: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def one_way(rates: Rates, tier: str, size: int) -> float:
    """Seconds that maps take to a lower tier, or from there."""
    return size / (rates.host if tier == "host" else rates.disk)


def lower_tiers(device: str | None, options: Options) -> Lower:
    """The tiers below a device that a user allows: a CPU has no host below it."""
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
    return Lower(
        None if alone else host, bool(options.disk), options.half, options.calls, parameters[options.parameters]
    )
