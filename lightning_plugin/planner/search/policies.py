"""Policies: restrictions of the search to some plans.

Without one the search may choose any plan. Published techniques are restrictions (`benchmarks.published`), so that they
can be compared at the same budget on the same network, and so that the unrestricted search is never worse as far as the
cost model knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_plugin.options import SPLITS
from lightning_plugin.plan import HALOS


@dataclass(frozen=True)
class Policy:
    """Allowed plans.

    Attributes:
        cuts: Everywhere, only where a statistic forces one, or there and at places that a function of `cuts.Cuts`
            returns.
        shape: Tiles, rows of tiles or whole maps.
        halos: Ways to get the rows between neighbouring tiles.
        keep: Segments may be kept: run whole, with the memory that backward needs.
        offload: Maps may go to lower tiers; "all": every map that can be offloaded is.
        drop: The depth to which stored maps may be dropped (`execute.recompute`).
        recall: Backward may read stored maps back (`program.recall`).
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
    if halo in SPLITS:
        return replace(policy, halos=("recompute",))
    if halo not in HALOS:
        raise ValueError(f"halo is one of 'auto', {', '.join(map(repr, (*HALOS, *SPLITS)))}, not {halo!r}")
    return replace(policy, halos=(halo,))
