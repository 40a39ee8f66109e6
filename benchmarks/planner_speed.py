"""Seconds to plan: `python -m benchmarks.planner_speed [NAME ...] [--profile]`.

They are processor time on one thread, so that other work on the machine does not count. Each network is planned twice,
in two processes with different hash seeds: the plans have to be equal. Parameters are on the meta device. `--profile`
prints where the time goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from torch import nn

from benchmarks.keep import keep_case
from lightning_plugin import make_plan
from tests.zoo import ZOO

BUDGET = "11GiB"
DEVICE = "cuda:a100"


class Chain(nn.Module):
    """Residual blocks of two convolutions, as many as it takes: 7 operators each."""

    def __init__(self, blocks: int, per_stage: int) -> None:
        super().__init__()
        width, layers = 64, [nn.Conv2d(3, 64, 7, 2, 3)]
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
    """A network, the side of its image, and the seconds that planning may take."""

    build: Callable[[], nn.Module]
    side: int
    allowed: float


CASES = {
    "vgg16": Case(ZOO["vgg16"].full, 20480, 10),  # type: ignore[arg-type]
    "resnet18": Case(ZOO["resnet18"].full, 20480, 10),  # type: ignore[arg-type]
    "resnet50": Case(ZOO["resnet50"].full, 20480, 10),  # type: ignore[arg-type]
    "1000 operators": Case(lambda: Chain(142, 36), 20480, 60),
}


def plan(case: Case) -> tuple[float, str]:
    """Seconds, and the plan as JSON."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        net = case.build().train()
    begin = time.process_time()
    found = make_plan(net, (1, 3, case.side, case.side), budget=BUDGET, device=DEVICE)
    return time.process_time() - begin, found.to_json()


def apart(name: str, hash_seed: int) -> tuple[float, str]:
    """The same in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.planner_speed", name, "--child"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds, text = json.loads(run.stdout)
    return seconds, text


def row(name: str) -> dict[str, Any]:
    case = CASES[name]
    (first, one), (second, other) = apart(name, 1), apart(name, 2)
    segments = json.loads(one)["segments"]
    return {
        "network": name,
        "side": case.side,
        "budget": BUDGET,
        "device": DEVICE,
        "seconds": round(min(first, second), 2),
        "allowed": case.allowed,
        "deterministic": one == other,
        "segments": len(segments),
    }


def profiled(name: str) -> None:
    profile = cProfile.Profile()
    profile.runcall(plan, CASES[name])
    pstats.Stats(profile).sort_stats("cumulative").print_stats(35).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(CASES)
    if options.child:
        print(json.dumps(plan(CASES[names[0]])))
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
