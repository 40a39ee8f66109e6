"""Ours against published and simple ways to plan, on the convolutional part of VGG-16 with global pooling.

    python -m benchmarks.policies [--limit 131072] [--side 768] [--share 0.25] [--rounds 7] [--policy hmms]

For each policy: the largest square image whose training step is planned under 1 GiB (planning only: nothing is run),
and the time of a step at one size under one budget, predicted and measured. Steps of all policies and of plain PyTorch
take turns, under plans by rates that are calibrated before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.progress import track
from torch import nn

from benchmarks.against_plain import step, vgg16
from benchmarks.calibrated import calibrated
from benchmarks.keep import keep_case
from benchmarks.largest_image import largest, planned
from benchmarks.published import POLICIES, sft
from benchmarks.table import table
from lightning_plugin import BudgetError, Plan, TiledModule, make_plan
from lightning_plugin.planner.make import rates_for

GIB = 2**30
#: Sides are multiples of this.
UNIT = 256
NAMES = (*POLICIES, "sft")


def plan_by(policy: str, net: nn.Module, shape: tuple[int, ...], budget: int) -> Plan:
    if policy == "sft":
        return sft(net, shape, budget, rates_for("cpu"))
    return make_plan(net, shape, budget=budget, policy=POLICIES[policy], device="cpu")


def fitting(policy: str) -> Callable[[int], bool]:
    """A test of a side: true where its step can be planned under 1 GiB."""
    if policy != "sft":
        return planned(GIB, policy=POLICIES[policy])
    with torch.device("meta"):
        net = vgg16()

    def fits(side: int) -> bool:
        try:
            sft(net, (1, 3, side, side), GIB)
        except BudgetError:
            return False
        return True

    return fits


def times(policies: Sequence[str], side: int, share: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of a step of each policy, and of plain PyTorch, under parameters, gradients and a share of what plain
    PyTorch holds."""
    net = vgg16()
    plain_bytes = make_plan(net, (1, 3, side, side), budget="1TiB").plain_bytes
    budget = int(sum(2 * p.numel() * p.element_size() for p in net.parameters()) + share * plain_bytes)
    x = torch.randn(1, 3, side, side)
    modules: dict[str, nn.Module] = {"plain": net}
    found: dict[str, dict[str, Any]] = {"plain": {"peak_bytes": None, "predicted_seconds": None}}
    for policy in policies:
        begin = time.process_time()
        try:
            plan = plan_by(policy, net, (1, 3, side, side), budget)
        except BudgetError as error:
            found[policy] = {"needs_bytes": error.smallest, "budget_bytes": budget}
            continue
        modules[policy] = TiledModule(net, plan=plan)
        found[policy] = {
            "budget_bytes": budget,
            "peak_bytes": plan.peak_bytes,
            "plan_seconds": time.process_time() - begin,
            "predicted_seconds": plan.seconds,
            "recompute_share": None if policy == "sft" else plan.recompute,
        }
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for turn in track(range(rounds + 1), description="steps"):
        for name, module in modules.items():
            taken = step(module, x)
            if turn:  # the first warms up
                seconds[name].append(taken)
    for name, taken_all in seconds.items():
        found[name]["seconds"] = statistics.median(taken_all)
        found[name]["ratio"] = statistics.median(t / p for t, p in zip(taken_all, seconds["plain"], strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=131072, help="the largest side that is tried")
    parser.add_argument("--side", type=int, default=768, help="side of the image that is timed")
    parser.add_argument("--share", type=float, default=0.25, help="of plain PyTorch's activations, as budget")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--policy", action="append", choices=NAMES, help="only these, and plain PyTorch")
    parser.add_argument("--only", choices=("largest", "times"), default=None)
    options = parser.parse_args()
    policies = options.policy or NAMES
    sides = (
        {p: largest(fitting(p), options.limit, UNIT, 16) for p in track(policies)} if options.only != "times" else {}
    )
    found: dict[str, dict[str, Any]] = {}
    if options.only != "largest":
        with calibrated():
            found = times(policies, options.side, options.share, options.rounds)
    for name in ("plain", *policies):
        row = found.get(name, {})
        if row and not (options.policy and name == "plain"):  # what was measured with all stays
            about = {"network": "vgg16", "policy": name, "side": options.side, "share": options.share}
            keep_case("policies", f"{name} {options.side} {options.share:g}", {**about, **row})
        if name in sides:
            about = {"network": "vgg16", "policy": name, "budget": "1GiB", "limit": options.limit}
            keep_case("policies", f"{name} largest", {**about, "largest_side": sides[name]})
    print(table("policies", ["largest_side", "seconds", "ratio", "predicted_seconds", "peak_bytes"]))


if __name__ == "__main__":
    main()
