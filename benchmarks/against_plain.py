"""Time of a training step under a budget against plain PyTorch, side by side in one run.

    python -m benchmarks.against_plain [--side 2048] [--pairs 7] [--threads 2] [NETWORK ...]

The budget is what parameters and their gradients take, and a share of what plain PyTorch holds for backward. A pair is
one plain and one tiled step, which of them first taking turns; the ratio is the median over pairs. Planning comes
before, once for all steps, and is timed apart (`--planning` times nothing else, for the rows there are). The first step
of each, which warms up, is not counted.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.keep import amend_case, keep_case
from lightning_plugin import Plan, TiledModule, make_plan
from tests.zoo import ZOO


def vgg16() -> nn.Module:
    """VGG-16's convolutional part with global pooling."""
    return ZOO["vgg16_mean"].published()


def frozen(net: nn.Module) -> nn.Module:
    """A network in train mode whose BatchNorms use their running statistics."""
    net.train()
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    return net


def resnet18_frozen() -> nn.Module:
    return frozen(ZOO["resnet18"].published())


def resnet50_frozen() -> nn.Module:
    return frozen(ZOO["resnet50"].published())


def resnet18_train() -> nn.Module:
    """ResNet-18 whose BatchNorms use the image's statistics."""
    return ZOO["resnet18"].published().train()


NETWORKS = {
    "vgg16": vgg16,
    "resnet18_frozen": resnet18_frozen,
    "resnet50_frozen": resnet50_frozen,
    "resnet18_train": resnet18_train,
}
#: Shares of plain PyTorch's activations, and the ratio that is aimed at. A share above one leaves the network whole.
SHARES = {"all": (1.25, 1.0), "quarter": (0.25, 1.05), "eighth": (1 / 8, 1.1), "sixteenth": (1 / 16, 1.15)}
TRAIN_AIMS = {"all": 1.0, "quarter": 1.4, "sixteenth": 1.5}


@dataclass(frozen=True)
class Trial:
    network: str
    share: str
    side: int

    def budget(self, net: nn.Module) -> int:
        fixed = sum(2 * p.numel() * p.element_size() for p in net.parameters())
        fixed += sum(b.numel() * b.element_size() for b in net.buffers())
        plain = make_plan(net, (1, 3, self.side, self.side), budget="1TiB").plain_bytes
        return int(fixed + SHARES[self.share][0] * plain)


def step(module: nn.Module, x: Tensor) -> float:
    """Seconds of one training step."""
    module.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    out = module(x)
    out.float().square().mean().backward()
    return time.perf_counter() - begin


def measure(trial: Trial, pairs: int) -> dict[str, Any]:
    """Median ratio of paired steps, and what the plan says of itself."""
    plain = NETWORKS[trial.network]()
    net = copy.deepcopy(plain)
    x = torch.randn(1, 3, trial.side, trial.side)
    planning, plan = planned(trial, net)
    tiled = TiledModule(net, plan=plan)
    step(tiled, x), step(plain, x)
    both: list[tuple[float, float]] = []
    for i in range(pairs):
        seconds = {}
        for module in (plain, tiled) if i % 2 else (tiled, plain):
            seconds[module is tiled] = step(module, x)
        both.append((seconds[False], seconds[True]))
    return {**summary(trial, plan, both), "peak_bytes": tiled.peak_bytes, "plan_seconds": planning}


def planned(trial: Trial, net: nn.Module) -> tuple[float, Plan]:
    """The plan of a trial, and the seconds it took to make: processor time, so that other work does not count."""
    budget = trial.budget(net)
    begin = time.process_time()
    plan = make_plan(net, (1, 3, trial.side, trial.side), budget=budget)
    return time.process_time() - begin, plan


def summary(trial: Trial, plan: Plan, both: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [t / p for p, t in both]
    aim = SHARES[trial.share][1]
    if trial.network == "resnet18_train":
        aim = TRAIN_AIMS.get(trial.share, float("nan"))
    return {
        "network": trial.network,
        "side": trial.side,
        "share": trial.share,
        "budget_bytes": plan.budget,
        "plain_bytes": plan.plain_bytes,
        "plain_seconds": statistics.median(p for p, _ in both),
        "tiled_seconds": statistics.median(t for _, t in both),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "aim": aim,
        "recompute_share": plan.recompute,
        "predicted_seconds": plan.seconds,
        "segments": len(plan.segments),
        "tiers": sorted({s.tier for s in plan.segments}),
        "halos": sorted({s.halo for s in plan.segments if not s.keep}),
        "pairs": len(both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help=", ".join(NETWORKS))
    parser.add_argument("--side", type=int, default=2048, help="pixels on a side of the square image")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--shares", nargs="*", default=list(SHARES), help=", ".join(SHARES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--planning", action="store_true", help="only time planning, for the rows there are")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    for name in options.networks or list(NETWORKS):
        for share in options.shares:
            if options.planning:
                trial = Trial(name, share, options.side)
                seconds = planned(trial, NETWORKS[name]())[0]
                amend_case("against_plain", f"{name} {options.side} {share}", {"plan_seconds": seconds})
                continue
            found = measure(Trial(name, share, options.side), options.pairs)
            console.print(
                f"{name} {options.side}² {share}: {found['ratio']:.2f} of plain's {found['plain_seconds']:.1f} s "
                f"(aim {found['aim']}), recompute {found['recompute_share']:.2f}"
            )
            keep_case("against_plain", f"{name} {options.side} {share}", found)


if __name__ == "__main__":
    main()
