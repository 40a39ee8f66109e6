"""Named policies: which plans a search may choose from.

``auto`` may choose from all. The others are what has been published, and what is simplest, as restrictions of it, so
that they can be compared at the same budget on the same network, and so that ours is never worse as far as the cost
model knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_plugin.options import SPLITS
from lightning_plugin.plan import HALOS


@dataclass(frozen=True)
class Policy:
    """What is allowed.

    ``cuts``: everywhere, only where a statistic forces one, or where a transfer is paid for (`planner.search.offload`).
    ``shape``: tiles, rows of tiles or whole maps. ``keep``: parts run whole with what backward needs left in memory.
    ``spill``: whether maps go to lower tiers, or all that can. ``drop``: how deep stored maps may be dropped
    (`execute.again`). ``recall``: whether backward may read them back (`program.recall`). ``same``: forward and
    backward on one grid. ``uniform``: all segments on one grid.
    """

    cuts: Literal["all", "stages", "paid"] = "all"
    shape: Literal["tiles", "rows", "whole"] = "tiles"
    halos: tuple[str, ...] = HALOS
    keep: bool = True
    spill: bool | Literal["all"] = True
    drop: int = 3
    recall: bool = False
    same: bool = False
    uniform: bool = False


ONE = ("recompute",)

POLICIES: dict[str, Policy] = {
    "auto": Policy(recall=True),
    # Everything from one statistic to the next fused, on one grid. Not what SFT does, which fuses and tiles only maps
    # that do not fit into memory whole, and stores the others.
    "fused-stages": Policy(cuts="stages", halos=ONE, keep=False, spill=False, drop=0, same=True, uniform=True),
    # Rows with overlapping halos, with and without stored boundaries between (LR-CNN).
    "overl": Policy(cuts="stages", shape="rows", halos=ONE, keep=False, spill=False, drop=0),
    "overl-h": Policy(shape="rows", halos=ONE, keep=False, spill=False, drop=0),
    # Rows that hand boundary rows on, with and without stored boundaries between (LR-CNN).
    "2ps": Policy(cuts="stages", shape="rows", halos=("share",), keep=False, spill=False, drop=0),
    "2ps-h": Policy(shape="rows", halos=("share",), keep=False, spill=False, drop=0),
    # Everything goes to a lower tier while the device computes, and is cut where that costs no waiting (HMMS's
    # Algorithm 1; what differs is said in `planner.search.offload`).
    "hmms": Policy(cuts="paid", halos=ONE, keep=False, spill="all", drop=0),
    # torch.utils.checkpoint.checkpoint_sequential: whole segments, the last of them kept.
    "checkpoint_sequential": Policy(shape="whole", halos=ONE, spill=False, drop=0),
}


def policy_of(name: str, halo: str = "auto") -> Policy:
    """A policy by name, with what the user says of halos; what splits leave of them is computed twice."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if halo == "auto":
        return policy
    if halo in SPLITS:
        return replace(policy, halos=ONE)
    if halo not in HALOS:
        raise ValueError(f"halo is one of 'auto', {', '.join(map(repr, (*HALOS, *SPLITS)))}, not {halo!r}")
    return replace(policy, halos=(halo,))
