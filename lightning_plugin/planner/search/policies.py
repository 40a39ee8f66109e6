"""Restrictions of a search: which plans it may choose from.

Without any it may choose from all. Published techniques are restrictions (`benchmarks.published`), so that they can be
compared at the same budget on the same network, and so that ours is never worse as far as the cost model knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_plugin.options import SPLITS
from lightning_plugin.plan import HALOS


@dataclass(frozen=True)
class Policy:
    """What is allowed.

    ``cuts``: everywhere, only where a statistic forces one, or there and where a function of `cuts.Cuts` says.
    ``shape``: tiles, rows of tiles or whole maps. ``keep``: parts run whole with what backward needs left in memory.
    ``spill``: whether maps go to lower tiers, or all that can. ``drop``: how deep stored maps may be dropped
    (`execute.recompute`). ``recall``: whether backward may read them back (`program.recall`). ``same``: a segment's
    forward and backward on one grid.
    """

    cuts: Literal["all", "stages"] | Callable[[Any], Iterable[int]] = "all"
    shape: Literal["tiles", "rows", "whole"] = "tiles"
    halos: tuple[str, ...] = HALOS
    keep: bool = True
    spill: bool | Literal["all"] = True
    drop: int = 3
    recall: bool = True
    same: bool = False


#: No restriction.
AUTO = Policy()


def with_halo(policy: Policy, halo: str) -> Policy:
    """A policy with what the user says of halos; what splits leave of them is computed twice."""
    if halo == "auto":
        return policy
    if halo in SPLITS:
        return replace(policy, halos=("recompute",))
    if halo not in HALOS:
        raise ValueError(f"halo is one of 'auto', {', '.join(map(repr, (*HALOS, *SPLITS)))}, not {halo!r}")
    return replace(policy, halos=(halo,))
