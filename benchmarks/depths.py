"""What dropping boundaries deeper saves: `python -m benchmarks.depths [--layers 20 40] [--side 1024]`.

A chain of convolutions with train-mode BatchNorm, each of which needs the whole of the map before it, under no lower
tier: every boundary is stored on the device, or dropped to a depth. For each depth allowed, 5 % more than the smallest
budget that works, and a real step under it: what the allocator says it holds, and its time against a step of plain
PyTorch, in turns.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks.against_plain import step
from benchmarks.keep import keep_case
from lightning_plugin import BudgetError, TiledModule
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import choose_plan
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.planner.make import rates_for
from lightning_plugin.planner.search.policies import Policy
from lightning_plugin.units import format_bytes
from tests.lightning_plugin.planner.test_budget import step_from_outside

WIDTH = 16
DEEPEST = 3
#: Under the very smallest budget tiles may be of a few positions.
MARGIN = 1.05


def chain(layers: int) -> nn.Module:
    parts: list[nn.Module] = []
    for i in range(layers):
        conv = nn.Conv2d(WIDTH if i else 3, WIDTH, 3, padding=1, bias=False)
        parts += [conv, nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1))


def frugal(net: nn.Module, shape: tuple[int, ...], depth: int) -> Plan:
    """The plan for little more than the smallest budget that works where maps may be dropped so deep."""
    policy, lower, rates = Policy(spill=False, drop=depth), lower_tiers(None, Options(disk=False)), rates_for(None)
    with recorded(net, shape, torch.float32) as (network, _):
        try:
            return choose_plan(network, rates, 1000, lower, policy)
        except BudgetError as error:
            return choose_plan(network, rates, int(MARGIN * error.smallest), lower, policy)


def rows(layers: int, side: int, rounds: int) -> list[dict[str, Any]]:
    """Plain PyTorch, and every depth."""
    net, x = chain(layers), torch.randn(1, 3, side, side)
    plans = {depth: frugal(net, tuple(x.shape), depth) for depth in range(DEEPEST + 1)}
    modules = {depth: TiledModule(net, plan=plan) for depth, plan in plans.items()}
    plain = step_from_outside(net, net, x)
    found: dict[int, dict[str, Any]] = {}
    for depth, plan in plans.items():
        net.zero_grad(set_to_none=True)
        found[depth] = {
            "layers": layers,
            "side": side,
            "map_bytes": 4 * WIDTH * side**2,
            "plain_bytes": plain,
            "deepest allowed": depth,
            "deepest": max(s.drop for s in plan.segments),
            "budget_bytes": plan.budget,
            "peak_bytes": step_from_outside(modules[depth], net, x),
            "forwards recomputed": plan.recompute,
        }
    ratios: dict[int, list[float]] = {depth: [] for depth in plans}
    for _ in range(rounds):
        for depth, module in modules.items():
            before = step(net, x)
            ratios[depth].append(step(module, x) / before)
    return [{**found[depth], "ratio": statistics.median(ratios[depth])} for depth in plans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40])
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of steps")
    options = parser.parse_args()
    table = Table("layers", "dropped", "budget", "held", "of plain's", "forwards recomputed", "time of plain's")
    for layers in track(options.layers, description="chains"):
        for r in rows(layers, options.side, options.rounds):
            keep_case("depths", f"{layers} layers, {r['deepest allowed']} deep", r)
            table.add_row(
                str(layers),
                f"{r['deepest']} deep" if r["deepest"] else "no",
                format_bytes(r["budget_bytes"]),
                format_bytes(r["peak_bytes"]),
                f"{r['peak_bytes'] / r['plain_bytes']:.2f}",
                f"{100 * r['forwards recomputed']:.0f} %",
                f"{r['ratio']:.2f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
