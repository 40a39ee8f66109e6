"""One score: what a step costs in a quarter of plain PyTorch's memory, as geometric means over six networks.

    python -m benchmarks.score [--side 320] [--pairs 5]

Each network runs in a process of its own, on one thread: a step of either way for the process's peak, then pairs of
steps that take turns. Time is the median ratio of processor time; memory is the ratio of what the two steps took beyond
what the process held before, parameters and gradients included. The budget is parameters, gradients and a quarter of
what plain PyTorch holds for backward. Every run is appended to benchmarks/results/score.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from benchmarks.against_plain import frozen
from benchmarks.keep import machine, write
from lightning_plugin import TiledModule, make_plan
from tests.conftest import RESULTS
from tests.lightning_plugin.planner.peaks import CLEAR, of_status, warm_up
from tests.zoo import ZOO

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "VGG-16": lambda: ZOO["vgg16_mean"].published().train(),
    "ResNet-18, frozen": lambda: frozen(ZOO["resnet18"].published()),
    "ResNet-50, train": lambda: ZOO["resnet50"].published().train(),
    "DarkNet-19, train": lambda: ZOO["darknet19"].published().train(),
    "U-Net, train": lambda: ZOO["unet_bilinear"].published().train(),
    "ConvNeXt-tiny": lambda: ZOO["convnext_tiny"].published().train(),
}
SHARE = 0.25
FILE = RESULTS / "score.json"


def step(module: nn.Module, x: Tensor) -> float:
    """Processor seconds of one training step."""
    module.zero_grad(set_to_none=True)
    begin = time.process_time()
    module(x).square().mean().backward()
    return time.process_time() - begin


def process_peak(module: nn.Module, x: Tensor) -> int:
    """Bytes that two steps, of which the first finds the heap empty, take beyond what the process held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = of_status("VmRSS")
    CLEAR.write_text("5")
    for _ in range(2):
        step(module, x)
    module.zero_grad(set_to_none=True)
    return of_status("VmHWM") - before


def measure(name: str, side: int, pairs: int) -> dict[str, Any]:
    """One network: time and memory over plain PyTorch's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = NETWORKS[name]()
    x = torch.randn(1, 3, side, side)
    plain_bytes = make_plan(net, tuple(x.shape), budget="1TiB").plain_bytes
    held = sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
    budget = int(held + sum(p.nbytes for p in net.parameters()) + SHARE * plain_bytes)
    tiled = TiledModule(net, budget=budget)
    warm_up()
    peaks = [held + process_peak(module, x) for module in (tiled, net)]
    ratios = []
    for i in range(pairs):
        seconds = {module: step(module, x) for module in ((net, tiled) if i % 2 else (tiled, net))}
        ratios.append(seconds[tiled] / seconds[net])
    return {
        "time": statistics.median(ratios),
        "memory": peaks[0] / peaks[1],
        "budget_bytes": budget,
        "process_bytes": peaks[0],
        "plain_process_bytes": peaks[1],
    }


def in_a_process(name: str, side: int, pairs: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.score", "--network", name, "--side", str(side), "--pairs", str(pairs)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=320, help="pixels on a side of the square image")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--network", choices=sorted(NETWORKS), help="measure one here, and print it as JSON")
    options = parser.parse_args()
    if options.network:
        print(json.dumps(measure(options.network, options.side, options.pairs)))
        return
    rows = {name: in_a_process(name, options.side, options.pairs) for name in track(NETWORKS)}
    score = {key: math.exp(statistics.fmean(math.log(row[key]) for row in rows.values())) for key in ("time", "memory")}
    run = {
        "date": date.today().isoformat(),
        "version": version("wsi-trainer"),
        "machine": {**machine(), "threads": 1},
        "side": options.side,
        **score,
        "networks": rows,
    }
    history = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    write(FILE, {"name": "score", "runs": [*history, run]})
    table = Table("network", "time", "memory", title=f"in a quarter of plain PyTorch's memory, at {options.side}²")
    for name, row in rows.items():
        table.add_row(name, f"{row['time']:.2f}", f"{row['memory']:.2f}")
    table.add_section()
    table.add_row("score", f"{score['time']:.2f}", f"{score['memory']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
