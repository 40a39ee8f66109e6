"""Whether predicted time ranks plans rightly: 20 different plans of one network and image, predicted and measured.

    python -m benchmarks.time_ranking [--threads 1 2] [--rounds 3] [--rates calibrated|table] [NETWORK ...]

The plans come from a seeded choice among budgets, policies, halos and fixed grids; plans that are equal count once.
Steps of all plans take turns, and a plan's time is the median over rounds. Writes benchmarks/results/time_ranking.json
and docs/figures/time-ranking.png.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.progress import track
from scipy.stats import spearmanr
from torch import nn

from benchmarks.against_plain import resnet18_frozen, step, vgg16
from benchmarks.keep import FIGURES, keep_case
from lightning_plugin import Plan, Rates, TiledModule, calibrate
from lightning_plugin.boxes import Grid
from lightning_plugin.options import Options
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import Chooser
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.planner.costs.rates import rates_of
from lightning_plugin.planner.search.policies import POLICIES, policy_of
from lightning_plugin.planner.search.predict import predict
from lightning_plugin.program.fixed import fixed
from lightning_plugin.spare import usable
from tests.conftest import RESULTS

#: Networks, and the side of an image on which a plain step takes a second or two.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {"vgg16": (vgg16, 256), "resnet18": (resnet18_frozen, 512)}
PLANS = 20
SEED = 20
#: Shares of plain PyTorch's activations, beside parameters and gradients, as budget.
SHARES = (0.03, 0.06, 0.1, 0.16, 0.25, 0.4, 0.6, 0.8, 1.25)
GRIDS = (1, 2, 3, 4, 5, 6, 8)
#: Of the seeded choices, so many in ten are fixed grids.
FIXED = 0.3


@dataclass(frozen=True)
class Choice:
    """One way to come to a plan: a fixed grid, or a policy under a share of plain PyTorch's activations."""

    policy: str
    share: float = 0.0
    halo: str = "auto"
    grid: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        if self.grid is not None:
            return f"{self.grid[0]}×{self.grid[1]}, {self.halo}"
        return f"{self.policy}, {self.share:g}" + ("" if self.halo == "auto" else f", {self.halo}")


def choices(seed: int) -> Iterator[Choice]:
    """Seeded choices without end."""
    dice = random.Random(seed)
    while True:
        if dice.random() < FIXED:
            halo = dice.choice(("recompute", "share"))
            rows = dice.choice(GRIDS)
            yield Choice("fixed", halo=halo, grid=(rows, 1 if halo == "share" else dice.choice((1, rows))))
        else:
            policy = dice.choice(list(POLICIES))
            halo = dice.choice(("auto", "recompute", "share")) if policy == "auto" else "auto"
            yield Choice(policy, dice.choice(SHARES), halo)


def plan_of(choice: Choice, network: Network, rates: Rates) -> Plan | None:
    """The plan of a choice, if there is one."""
    if choice.grid is not None:
        return fixed(network.nodes, Grid(choice.grid), halo=choice.halo)
    budget = network.fixed_bytes + int(choice.share * network.plain_bytes)
    chooser = Chooser(network, rates, lower_tiers(None, Options()), policy_of(choice.policy, choice.halo))
    # The search's first answer: whether it keeps the budget to the last byte is no matter of time.
    return chooser.search.whole(usable(budget)) or chooser.search.run(usable(budget))


def different(network: Network, rates: Rates, count: int, seed: int) -> dict[str, Plan]:
    """Plans that run different things, by the choice that first led there, with their predicted seconds."""
    found: dict[str, Plan] = {}
    seen: set[Any] = set()
    for choice in choices(seed):
        if len(found) == count:
            return found
        if choice.name in found:
            continue
        plan = plan_of(choice, network, rates)
        if plan is None:
            continue
        does = tuple((s.targets, s.forward, s.backward, s.keep, s.tier, s.halo, s.ahead, s.drop) for s in plan.segments)
        if does not in seen:
            seen.add(does)
            found[choice.name] = replace(plan, forecast=replace(plan.forecast, seconds=predict(plan, network, rates)))
    return found


def timed(net: nn.Module, plans: dict[str, Plan], side: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of steps that take turns, by the clock and of the processor."""
    x = torch.randn(1, 3, side, side)
    modules: dict[str, nn.Module] = {"plain": net, **{n: TiledModule(net, plan=p) for n, p in plans.items()}}
    clock: dict[str, list[float]] = {n: [] for n in modules}
    busy: dict[str, list[float]] = {n: [] for n in modules}
    for turn in track(range(rounds + 1), description="rounds"):
        for name, module in modules.items():
            begin = time.process_time()
            taken = step(module, x)
            if turn:  # the first warms up
                clock[name].append(taken)
                busy[name].append(time.process_time() - begin)
    return {n: {"seconds": statistics.median(clock[n]), "processor": statistics.median(busy[n])} for n in modules}


def measure(name: str, threads: int, rounds: int, rates: Rates) -> dict[str, Any]:
    build, side = CASES[name]
    torch.manual_seed(0)
    net = build()
    with recorded(net, (1, 3, side, side), torch.float32) as (network, _):
        plans = different(network, rates, PLANS, SEED)
    took = timed(net, plans, side, rounds)
    rows = {
        n: {**took[n], "predicted": p.seconds, "recompute": p.recompute, "segments": len(p.segments)}
        for n, p in plans.items()
    }
    rank = {
        kind: float(spearmanr([r["predicted"] for r in rows.values()], [r[kind] for r in rows.values()]).statistic)
        for kind in ("seconds", "processor")
    }
    return {"network": name, "side": side, "threads": threads, "rounds": rounds, "spearman": rank["seconds"],
            "spearman_processor": rank["processor"], "plain": took["plain"], "plans": rows}  # fmt: skip


def draw() -> None:
    """All cases that were measured."""
    cases = json.loads((RESULTS / "time_ranking.json").read_text())["cases"]
    figure, axes = plt.subplots(1, len(cases), figsize=(3.6 * len(cases), 3.7), layout="constrained", squeeze=False)
    for axis, found in zip(axes[0], cases.values(), strict=True):
        plans = found["plans"].values()
        axis.scatter([p["predicted"] for p in plans], [p["seconds"] for p in plans], color="#2a7f62", s=24)
        axis.axhline(found["plain"]["seconds"], color="#8a94a6", lw=1, ls="--", label="plain PyTorch")
        axis.set(xlabel="predicted seconds", ylabel="measured seconds", xscale="log", yscale="log")
        threads = f"{found['threads']} thread" + "s" * (found["threads"] > 1)
        axis.set_title(f"{found['network']} {found['side']}², {threads}\nSpearman {found['spearman']:.2f}", loc="left",
                       fontsize=10)  # fmt: skip
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
            scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            scale.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(FIGURES / "time-ranking.png", dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", choices=("calibrated", "table"), default="calibrated")
    options = parser.parse_args()
    console = Console()
    for threads in options.threads:
        torch.set_num_threads(threads)
        rates = calibrate("cpu") if options.rates == "calibrated" else rates_of("cpu")
        console.print(rates)
        for name in options.networks or list(CASES):
            found = measure(name, threads, options.rounds, rates)
            for plan, row in sorted(found["plans"].items(), key=lambda r: r[1]["predicted"]):
                console.print(
                    f"{plan:28} predicted {row['predicted']:6.2f} s, took {row['seconds']:6.2f} s "
                    f"({row['processor']:6.2f} of the processor)"
                )
            console.print(
                f"{name}, {threads} threads: Spearman {found['spearman']:.3f}, by processor time "
                f"{found['spearman_processor']:.3f}; plain took {found['plain']['seconds']:.2f} s"
            )
            keep_case("time_ranking", f"{name} {threads}", found)
    draw()


if __name__ == "__main__":
    main()
