"""What ``split="image"`` needs of a strategy: ranks that do the same, on the same batch, with the same random numbers.

The engine shares the tiles (`team`). It relies on this: that every rank records the same network on the same
image. What would break that is found before a step, by comparing what identifies a batch, and is an error on all ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.capture.lazy import LazyTensor
from lightning_plugin.planner.calibration.calibrate import local_rates
from lightning_plugin.plans import Planner
from lightning_plugin.strategy.resume import random_state, restore_random
from lightning_plugin.team import Team

#: How many numbers of a tensor, or places of an image, tell one batch from another.
PROBES = 5
#: Tensors up to this many elements are compared whole.
SMALL = 4096


def join(device: torch.device, planner: Planner) -> None:
    """Make a team of all ranks, and let them plan alike: for the budget that all can keep, with one rank's rates."""
    team = Team.of(device)
    budgets = team.gather(planner.options.budget)
    planner.team = team
    budget = None if None in budgets else min(b for b in budgets if b is not None)
    # Tiles that hand rows on run one after the other, and cannot be shared.
    halo = planner.options.halo if planner.options.splitting else "recompute"
    planner.options = replace(planner.options, budget=budget, halo=halo)
    planner.rates = team.gather(local_rates(device.type))[0]


def same_random_numbers(team: Team) -> None:
    """Give every rank the first one's generators: masks, shuffles and augmentations are drawn alike."""
    state = [random_state(team.device) if team.leads else None]
    dist.broadcast_object_list(state, group=team.group, group_src=0)
    if not team.leads:
        assert state[0] is not None
        restore_random(state[0], team.device)


def same_batch(team: Team, batch: Any) -> None:
    """Refuse batches that are not the same on every rank."""
    team.agree(
        fingerprint(batch),
        'with split="image" all ranks compute one batch together, and the ranks were given different batches. Leave '
        "use_distributed_sampler=True (it then gives all ranks the same), or let your own sampler and dataset return "
        "the same on every rank.",
    )


def fingerprint(batch: Any) -> str:
    """What tells one batch from another: small tensors and numbers whole, of images a few places. Text may name a
    place on the machine, and tells nothing."""
    found = hashlib.sha256()

    def note(thing: Any) -> Any:
        if isinstance(thing, LazyTensor):
            found.update(image_bytes(thing))
        elif isinstance(thing, Tensor):
            found.update(f"{tuple(thing.shape)}{thing.dtype}".encode() + tensor_bytes(thing))
        else:
            found.update(str(thing).encode())
        return thing

    apply_to_collection(batch, (Tensor, int, float, bool), note)
    return found.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    if flat.numel() > SMALL:
        flat = flat[:: flat.numel() // SMALL]
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def image_bytes(lazy: LazyTensor) -> bytes:
    """The values at a few places of an image that is read box by box."""
    found = [f"{tuple(lazy.shape)}{lazy.dtype}".encode()]
    for image in lazy._session.root().recorded([lazy._value]).images:
        for i in range(1, PROBES + 1):
            extent, lead = image.layout.extent, image.instances
            space = len(image.source.shape) - lead - 1
            place = (size * i // (PROBES + 1) for size in extent[:space])
            box = Box.of([*((p, p + 1) for p in place), *((0, count) for count in extent[space:])])
            found.append(tensor_bytes(image.read(box)))
    return b"".join(found)
