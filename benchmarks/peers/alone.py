"""One way on one work, in this process: prints what it took, as JSON. `python -m benchmarks.peers` starts it.

Memory is the process's: the kernel's high-water mark over what it held when everything was imported, the network and
the image were there, and one convolution had run. `peak` is all that follows, `step_peak` the step that is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.networks import build
from benchmarks.peers.works import Work

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def of_status(name: str) -> int:
    """A figure of this process, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def high_water() -> int:
    """The most memory since the last call."""
    found = of_status("VmHWM")
    CLEAR.write_text("5")
    return found


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Distances of gradients from plain PyTorch's: of all, and of the worst parameter, in their norms."""
    missing = expected.keys() - found.keys()
    if missing:
        raise SystemExit(f"no gradient of {', '.join(sorted(missing))}")
    apart = {name: float((found[name].double() - e.double()).norm()) for name, e in expected.items()}
    norms = {name: float(e.double().norm()) for name, e in expected.items()}
    floor = 1e-3 * max(norms.values())
    both = [sum(v * v for v in each.values()) ** 0.5 for each in (apart, norms)]
    return {"error": both[0] / both[1], "worst_error": max(apart[n] / max(norms[n], floor) for n in apart)}


def measure(work: Work, module: str, function: str, budget: int, reference: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    make = getattr(import_module(f"benchmarks.peers.{module}"), function)
    net, image = build(work.network, work.width, bool(work.patches)), work.image()
    nn.Conv2d(3, 8, 3)(torch.rand(1, 3, 64, 64)).sum().backward()
    baseline = of_status("VmRSS")
    high_water()
    began = time.perf_counter()
    tiled = None
    if budget:
        step, tiled = make(net, image, work, budget)
    else:
        step = make(net, image, work)
    step()
    first, set_up = high_water(), time.perf_counter() - began
    net.zero_grad(set_to_none=True)
    clock, processor = time.perf_counter(), time.process_time()
    step()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    last = high_water()
    gradients = {n: p.grad for n, p in net.named_parameters() if p.requires_grad and p.grad is not None}
    if not reference.exists():
        torch.save(gradients, reference)
    found = {
        "seconds": clock,
        "processor_seconds": processor,
        "first_seconds": set_up,
        "peak": max(first, last) - baseline,
        "step_peak": last - baseline,
        "baseline": baseline,
        "torch": torch.__version__,
        **errors(gradients, torch.load(reference)),
    }
    if tiled is not None:
        plan = tiled.plan
        found |= {"budget": budget, "predicted_seconds": plan.seconds, "ledger": tiled.peak_bytes}
        found |= {"plan": str(plan).splitlines()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", help="its fields, as JSON")
    parser.add_argument("module")
    parser.add_argument("function")
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--reference", type=Path, required=True, help="plain PyTorch's gradients; written if not there")
    options = parser.parse_args()
    said = json.loads(options.work)
    work = Work(**{f.name: said[f.name] for f in fields(Work)})
    found = measure(work, options.module, options.function, options.budget, options.reference)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
