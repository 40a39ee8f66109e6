"""Two training steps in a process of their own, and what they took: `python -m tests.lightning_plugin.planner.peaks`.

The kernel's high-water mark is reset after one warm-up convolution, so that what follows is planning and the steps.
What a strategy's process has imported is imported before, PyTorch's compiler among it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytorch_lightning  # noqa: F401
import torch
from torch import nn

from lightning_plugin import TiledModule
from tests.zoo import ZOO

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def of_status(name: str) -> int:
    """A figure of this process, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def warm_up() -> None:
    nn.Conv2d(3, 8, 3)(torch.rand(1, 3, 64, 64)).sum().backward()


def measure(name: str, side: int, budget: int, trim: bool) -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = ZOO[name].build().train()
    image = torch.rand(1, 3, side, side)
    warm_up()
    baseline = of_status("VmRSS")
    CLEAR.write_text("5")
    tiled = TiledModule(net, budget=budget, trim=trim)
    tiled(image).sum().backward()
    tiled(image).sum().backward()  # the first step finds the heap empty
    over = of_status("VmHWM") - baseline
    plan = tiled.plan
    assert plan is not None
    return {
        "network": name,
        "side": side,
        "budget": budget,
        "baseline": baseline,
        "over_baseline": over,
        "ledger": tiled.peak_bytes,
        "predicted": plan.peak_bytes,
        "plain": plan.plain_bytes,
        "disk": sum(s.forecast.stored_bytes for s in plan.segments if s.tier == "disk"),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] != ["leave"])))
