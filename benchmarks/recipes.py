"""Planning for slides of many sizes: `python -m benchmarks.recipes [NAME ...] [--sizes 50]`.

Every size is planned in turn, as a training comes by them. Seconds are processor time on one thread, for planning
alone: what a user's step records is not counted. Of some sizes the plan is compared with a search of their own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from benchmarks.keep import keep_case
from lightning_plugin.engine import Engine
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.plans import Planner
from lightning_plugin.units import parse_bytes
from tests.zoo import ZOO

DEVICE = "cuda:a100"
#: Sides differ from the middle one by no more than this share.
SPREAD = 0.2


@dataclass(frozen=True)
class Case:
    """A network of the zoo, the side in the middle, and the budget."""

    network: str
    side: int
    budget: str


CASES = {
    "resnet18": Case("resnet18", 20480, "4GiB"),
    "vgg16": Case("vgg16", 8192, "4GiB"),
}


def engine_of(case: Case) -> Engine:
    return Engine(Planner(Options(budget=parse_bytes(case.budget)), DEVICE, accumulates=True))


def measure(case: Case, count: int, searched: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with torch.device("meta"):
        net = ZOO[case.network].published().train()
    rng = random.Random(0)
    sizes = [tuple(int(case.side * rng.uniform(1 - SPREAD, 1 + SPREAD)) for _ in range(2)) for _ in range(count)]
    used = engine_of(case)
    seconds, slower = [], []
    for i, size in enumerate(track(sizes, case.network)):
        with recorded(net, (1, 3, *size), torch.float32) as (network, _):
            begin = time.process_time()
            plan = used.choose(network.recording)
            seconds.append(time.process_time() - begin)
            if 0 < i <= searched:
                slower.append(plan.seconds / own(case, network).seconds)
    return {
        "budget": case.budget,
        "side": case.side,
        "sizes": count,
        "searches": sum(map(len, used.planner._recipes.values())),
        "seconds of the first": round(seconds[0], 2),
        "seconds of all": round(sum(seconds), 2),
        "median seconds of a further size": round(statistics.median(seconds[1:]), 3),
        "predicted time over that of a search": [min(slower), max(slower)] if slower else [],
    }


def own(case: Case, network: Network) -> Plan:
    """The plan of a search for one size."""
    return engine_of(case).choose(network.recording)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--sizes", type=int, default=50, help="how many sizes are planned")
    parser.add_argument("--searched", type=int, default=8, help="how many of them are searched for too")
    options = parser.parse_args()
    for name in options.names or CASES:
        found = measure(CASES[name], options.sizes, options.searched)
        print(found)
        keep_case("recipes", name if options.sizes == 50 else f"{name}, {options.sizes} sizes", found)


if __name__ == "__main__":
    main()
