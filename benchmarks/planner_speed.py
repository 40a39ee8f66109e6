"""Seconds to plan: `python -m benchmarks.planner_speed [NAME ...] [--profile]`.

They are processor time on one thread, so that other work on the machine does not count. Each network is planned twice,
in two processes with different hash seeds: the plans have to be equal. Parameters are on the meta device. What PyTorch
imports for the first optimizer of a process, its compiler, is imported before, since a training has one; how long that
takes is said beside. A third and a fourth process plan as `TiledModule` does, with an empty cache and with what the
third has left there. `--profile` prints where the time goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import nn

from benchmarks.keep import keep_case
from lightning_plugin import make_plan
from lightning_plugin.engine import Engine
from lightning_plugin.options import Options
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.plans import Planner
from lightning_plugin.units import parse_bytes
from tests.zoo import ZOO

BUDGET = "11GiB"
DEVICE = "cuda:a100"


class Chain(nn.Module):
    """Residual blocks of two convolutions, as many as it takes: 7 operators each."""

    def __init__(self, blocks: int, per_stage: int) -> None:
        super().__init__()
        width = 64
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3)]
        for i in range(blocks):
            if i and i % per_stage == 0:
                layers.append(nn.Conv2d(width, width * 2, 3, 2, 1))
                width *= 2
            layers.append(Block(width))
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + x)


@dataclass(frozen=True)
class Case:
    """A network, the side of its image, and the seconds that planning is to take."""

    build: Callable[[], nn.Module]
    side: int
    allowed: float


class Planned(NamedTuple):
    """The seconds of PyTorch's imports and of planning, and the plan as JSON."""

    imports: float
    seconds: float
    text: str


CASES = {
    "vgg16": Case(ZOO["vgg16"].published, 20480, 1),
    "resnet18": Case(ZOO["resnet18"].published, 20480, 3),
    "resnet50": Case(ZOO["resnet50"].published, 20480, 3),
    "1000 operators": Case(lambda: Chain(142, 36), 20480, 5),
    "20000 operators": Case(lambda: Chain(2857, 2857), 2048, 20),
}


def plan(case: Case) -> Planned:
    """A plan found by a search."""
    imports, net = ready(case)
    begin = time.process_time()
    found = make_plan(net, (1, 3, case.side, case.side), budget=BUDGET, device=DEVICE)
    return Planned(imports, time.process_time() - begin, found.to_json())


def started(case: Case) -> Planned:
    """A plan as `TiledModule` comes by it: from the cache, if it is there."""
    imports, net = ready(case)
    options = Options(budget=parse_bytes(BUDGET))
    engine = Engine(Planner(options, DEVICE, accumulates=True))
    with recorded(net, (1, 3, case.side, case.side), torch.float32, chains=options.chains) as (network, _):
        gc.freeze()  # or Python's collector may come by, and go through all of PyTorch's modules
        begin = time.process_time()
        found = engine.choose(network.recording)
        return Planned(imports, time.process_time() - begin, found.to_json())


def ready(case: Case) -> tuple[float, nn.Module]:
    """A network in a process that has made an optimizer, and the seconds that took."""
    torch.set_num_threads(1)
    begin = time.process_time()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    imports = time.process_time() - begin
    with torch.device("meta"):
        return imports, case.build().train()


def apart(name: str, how: str, **variables: str) -> Planned:
    """The same in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.planner_speed", name, "--child", how]
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Planned(*json.loads(run.stdout))


def row(name: str) -> dict[str, Any]:
    case = CASES[name]
    one, other = (apart(name, "plan", PYTHONHASHSEED=seed) for seed in "12")
    with tempfile.TemporaryDirectory() as folder:
        first, cached = (apart(name, "started", LIGHTNING_PLUGIN_CACHE=folder) for _ in range(2))
    return {
        "network": name,
        "side": case.side,
        "budget": BUDGET,
        "device": DEVICE,
        "seconds": round(min(one.seconds, other.seconds), 2),
        "seconds of imports": round(min(one.imports, other.imports), 2),
        "seconds with an empty cache": round(first.seconds, 2),
        "seconds from the cache": round(cached.seconds, 3),
        "allowed": case.allowed,
        "deterministic": one.text == other.text and first.text == cached.text,
        "segments": len(json.loads(one.text)["segments"]),
    }


def profiled(name: str) -> None:
    profile = cProfile.Profile()
    profile.runcall(plan, CASES[name])
    pstats.Stats(profile).sort_stats("cumulative").print_stats(35).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", choices=("plan", "started"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(CASES)
    if options.child:
        print(json.dumps((plan if options.child == "plan" else started)(CASES[names[0]])))
    elif options.profile:
        for name in names:
            profiled(name)
    else:
        for name in track(names, "planning"):
            found = row(name)
            print(found)
            keep_case("planner_speed", name, found)


if __name__ == "__main__":
    main()
