"""Residual networks of up to 250,001 layers: one training step, its memory and time, beside plain PyTorch's.

    python -m benchmarks.deep step [--layers 152 1001 10001 100001 250001] [--plain-up-to 100001]
    python -m benchmarks.deep both
    python -m benchmarks.deep picture

A network is a convolution to 4 channels, residual blocks of two convolutions each, and a mean over all positions: as
many convolutions as layers. Its image has 32 × 32 pixels in float64. The budget is for parameters, their gradients, and
8 + 2 log₂(layers) maps. Each depth has a process of its own, whose step is its first: nothing is planned or recorded
before. Plain PyTorch runs in the same process after that, where it is asked to. ``both`` is a deep network whose
parameters do not fit beside its maps, nor alone: 30 blocks of 256 channels on 96 × 96 in float32, on the disk.

Writes benchmarks/results/deep.json, a case for each depth, and the picture docs/figures/deep.png.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.keep import FIGURES, keep_case
from lightning_plugin import TiledModule
from lightning_plugin.units import format_bytes
from tests.conftest import RESULTS

CHANNELS, SIDE = 4, 32
MAP = CHANNELS * SIDE**2 * 8
LAYERS = (152, 1_001, 10_001, 100_001, 250_001)
#: Bytes of what is neither a parameter nor a map: the image, the loss.
REST = 1 << 16


class Block(nn.Module):
    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.02 * self.second(torch.relu(self.first(x)))


def network(layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block() for _ in range((layers - 1) // 2)]
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 2)
    ).double()


def process_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(layers: int, plain: bool) -> dict[str, Any]:
    """One step in this process, and one of plain PyTorch."""
    torch.set_num_threads(1)
    net, x = network(layers), torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64)
    parameters = sum(p.numel() * p.element_size() for p in net.parameters())
    budget = 2 * parameters + math.ceil((8 + 2 * math.log2(layers)) * MAP) + REST
    budget = math.ceil(budget / 0.99) + 2048  # a plan uses no more of a budget
    module = TiledModule(net, budget=budget, disk=False, chains="always")
    planner, planning = module.engine.planner, [0.0]
    search = planner.search

    def timed(*args: Any, **words: Any) -> Any:
        began = time.process_time()
        try:
            return search(*args, **words)
        finally:
            planning[0] += time.process_time() - began

    planner.search = timed  # type: ignore[method-assign]
    built = process_peak()
    began = time.process_time()
    loss = module(x).square().sum()
    loss.backward()
    seconds = time.process_time() - began
    plan = module.plan
    assert plan is not None and module.engine.ledger is not None
    row: dict[str, Any] = {
        "layers": layers,
        "parameters and gradients": 2 * parameters,
        "budget": budget,
        "peak": module.engine.ledger.peak_bytes,
        "maps": module.engine.ledger.peak_bytes - 2 * parameters,
        "one map": MAP,
        "chains": [
            {"links": c.count, "slots": c.slots, "kept": c.kept, "forwards": c.forecast.forwards} for c in plan.chains
        ],
        "plan characters": len(plan.to_json()),
        "seconds": seconds,
        "planning seconds": planning[0],
        "process peak": process_peak(),
        "process after building": built,
    }
    if plain:
        found = [p.grad for p in net.parameters()]
        net.zero_grad(set_to_none=True)
        began = time.process_time()
        expected = net(x).square().sum()
        expected.backward()
        row["plain seconds"] = time.process_time() - began
        scale = max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
        row["loss differs by"] = float((loss - expected).abs() / expected.abs())
        row["gradients differ by"] = max(
            float((a - p.grad).abs().max() / max(float(p.grad.abs().max()), 1e-3 * scale))
            for a, p in zip(found, net.parameters(), strict=True)
            if a is not None and p.grad is not None
        )
    return row


def both(options: argparse.Namespace) -> None:
    """A step under a budget that is smaller than the parameters alone, of which a map is a fifteenth."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    channels, side, count = 256, 96, 30
    blocks = (Block(channels) for _ in range(count))
    net = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(1, 3, side, side)
    parameters = sum(p.numel() * p.element_size() for p in net.parameters())
    module = TiledModule(net, budget=int(0.9 * parameters), chains="always")
    before, began = process_peak(), time.perf_counter()
    module(x).square().sum().backward()
    seconds = time.perf_counter() - began
    plan, ledger, peak = module.plan, module.engine.ledger, process_peak()
    assert plan is not None and ledger is not None
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    plain = copy.deepcopy(net)
    for p in plain.parameters():
        p.grad = None
    began = time.perf_counter()
    plain(x).square().sum().backward()
    pairs = zip(found, [p.grad for p in plain.parameters()], strict=True)
    row = {
        "parameters": parameters,
        "one map": channels * side**2 * 4,
        "plain holds for backward": plan.plain_bytes,
        "budget": plan.budget,
        "peak": ledger.peak_bytes,
        "process peak": peak,
        "process before": before,
        "on the disk": len(plan.on_disk),
        "chains": [{"links": c.count, "slots": c.slots, "kept": c.kept} for c in plan.chains],
        "seconds with planning": seconds,
        "plain seconds": time.perf_counter() - began,
        "gradients differ by": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if b is not None),
    }
    keep_case("deep", "both", row)
    print(plan)
    print(row)


def step(options: argparse.Namespace) -> None:
    # Maps go back to the system one by one: of small ones, the C library's heap would keep the holes between gradients.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MAP), "MALLOC_TRIM_THRESHOLD_": "0"}
    for layers in options.layers:
        words = [sys.executable, "-m", "benchmarks.deep", "alone", "--layers", str(layers)]
        words += ["--plain-up-to", str(options.plain_up_to)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise SystemExit(f"{layers} layers: {done.stderr[-4000:]}")
        row = json.loads(done.stdout.splitlines()[-1])
        keep_case("deep", f"{layers} layers", row)
        print(
            f"{layers:>8} layers: maps {format_bytes(row['maps'])}, {row['seconds']:.1f} s, of which "
            f"{row['planning seconds']:.1f} planning; plain {row.get('plain seconds', math.nan):.1f} s, gradients "
            f"differ by {row.get('gradients differ by', math.nan):.1e}; process {format_bytes(row['process peak'])}",
            flush=True,
        )


def picture(options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kept = json.loads((RESULTS / "deep.json").read_text())["cases"].values()
    cases = sorted((c for c in kept if "layers" in c), key=lambda c: c["layers"])
    layers = [c["layers"] for c in cases]
    figure, (memory, seconds) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    memory.plot(layers, [c["maps"] / 2**20 for c in cases], "o-", color="#2a7f9e", label="held beside parameters")
    plain = [3 * c["one map"] * (c["layers"] - 1) / 2 / 2**20 for c in cases]
    memory.plot(layers, plain, "--", color="#999999", label="what plain PyTorch keeps (3 maps a block)")
    memory.set(xscale="log", yscale="log", xlabel="layers", ylabel="MiB")
    seconds.plot(
        layers, [c["seconds"] for c in cases], "o-", color="#2a7f9e", label="a step, recording and planning in it"
    )
    there = [c for c in cases if "plain seconds" in c]
    seconds.plot(
        [c["layers"] for c in there], [c["plain seconds"] for c in there], "o--", color="#999999", label="plain PyTorch"
    )
    seconds.set(xscale="log", yscale="log", xlabel="layers", ylabel="processor seconds")
    for axes in (memory, seconds):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURES / "deep.png", dpi=130)
    print(FIGURES / "deep.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["step", "both", "picture", "alone"])
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--plain-up-to", type=int, default=100_001)
    options = parser.parse_args()
    if options.part == "alone":
        print(json.dumps(alone(options.layers[0], options.layers[0] <= options.plain_up_to)))
    else:
        {"step": step, "both": both, "picture": picture}[options.part](options)


if __name__ == "__main__":
    main()
