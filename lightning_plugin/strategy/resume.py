"""What a checkpoint keeps besides Lightning's own, so that a resumed run is the same run to the last bit.

Lightning saves no generator of random numbers; dropout and shuffling draw from them. A plan decides in which order sums
are taken, and so does the number of threads. All of it is kept in plain types: the checkpoint can be read without this
package, with ``weights_only=True`` too.
"""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

#: Where a checkpoint keeps it.
KEY = "lightning_plugin"


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator a step may draw from."""
    version, internal, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(k) for k in keys], int(place), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"].cpu(), device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"].cpu())


def restore_threads(count: int) -> None:
    """Sums over threads depend on how many there are."""
    if count == torch.get_num_threads():
        return
    if count <= (os.cpu_count() or 1):
        torch.set_num_threads(count)
        return
    log.warning(
        "the checkpoint was written with %d threads, this machine has %s processors: sums round differently, so the "
        "continued run will agree with the uninterrupted one only up to rounding",
        count,
        os.cpu_count(),
    )
