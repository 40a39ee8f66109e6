"""The engine on one CUDA device, in some minutes: steps against plain PyTorch, memory, tiny tiles, slides.

    python -m benchmarks.gpu [--parts pairs tiles large] [--only "vgg16 2048"] [--minutes 10]

`pairs` are steps under a share of what plain PyTorch holds, beside plain PyTorch's in one run, in float32 (with TF32,
as PyTorch has it by default) and bfloat16: time, the allocator's own peak, and what the plan said of both. `tiles` is
the cost of tiny tiles: the same network on ever finer grids. `large` are steps that plain PyTorch cannot make on the
device. Each case is written to benchmarks/results/gpu.json as it ends, with the name of the device, so that what was
cut off is there so far. After `--minutes` no case is begun; what is left is said, and a later call with `--rest` makes
the cases that this device has not made.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.against_plain import resnet18_frozen, resnet18_train, vgg16
from benchmarks.keep import keep_case, machine
from lightning_plugin import Plan, TiledModule, calibrate, make_plan
from lightning_plugin.units import format_seconds
from tests.conftest import RESULTS
from tests.zoo import ZOO

DEVICE = torch.device("cuda")
#: A ratio is a median over so many pairs, each of at least so many seconds.
PAIRS, LEAST = 7, 1.0


def resnet50() -> nn.Module:
    return ZOO["resnet50"].published().train()


NETWORKS = {
    "vgg16": vgg16,
    "resnet18_frozen": resnet18_frozen,
    "resnet18_train": resnet18_train,
    "resnet50_train": resnet50,
}


@dataclass(frozen=True)
class Case:
    """A network at a size; ``bf16``: under autocast; ``share``: of plain PyTorch's activations."""

    network: str
    side: int
    share: float
    bf16: bool = False

    @property
    def name(self) -> str:
        return f"{self.network} {self.side} {self.share:g} {'bf16' if self.bf16 else 'float32'}"

    def cast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.bf16 else nullcontext()

    def step(self, module: nn.Module, x: Tensor) -> None:
        module.zero_grad(set_to_none=True)
        with self.cast():
            out = module(x)
        out.float().square().mean().backward()


PAIRED = [
    Case("vgg16", 2048, 0.25),
    Case("vgg16", 2048, 1 / 16),
    Case("resnet18_frozen", 4096, 0.25),
    Case("resnet18_frozen", 4096, 1 / 16),
    Case("resnet18_train", 4096, 0.25),
    Case("resnet18_train", 4096, 1 / 16),
    Case("resnet50_train", 4096, 0.25),
    Case("vgg16", 4096, 0.25, bf16=True),
    Case("resnet18_frozen", 8192, 0.25, bf16=True),
    Case("resnet18_frozen", 8192, 1.25, bf16=True),
]
#: Sides and budgets, in GiB, of steps that plain PyTorch cannot make here.
LARGE = [
    (Case("resnet18_frozen", 16384, 0, bf16=True), 11),
    (Case("vgg16", 16384, 0, bf16=True), 24),
    (Case("resnet18_train", 16384, 0, bf16=True), 24),
    (Case("resnet18_frozen", 32768, 0, bf16=True), 24),
]


def timed(run: Callable[[], object], times: int = 1) -> float:
    """Seconds of a call, with all that it launches."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def peak(run: Callable[[], object], net: nn.Module) -> int:
    """The most that the allocator gave out during a call, with the network's own tensors."""
    torch.cuda.synchronize()
    own = sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
    own += sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    before = torch.cuda.memory_allocated() - own
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def planned(case: Case, net: nn.Module, x: Tensor, budget: int) -> tuple[Plan, float]:
    begin = time.process_time()
    with case.cast():
        plan = make_plan(net, x, budget=budget, device="cuda")
    return plan, time.process_time() - begin


def of_plan(plan: Plan) -> dict[str, Any]:
    return {
        "budget": plan.budget,
        "predicted_bytes": plan.peak_bytes,
        "predicted_seconds": plan.seconds,
        "segments": len(plan.segments),
        "tiers": sorted({s.tier for s in plan.segments}),
        "plan": str(plan).splitlines(),
    }


def pair(case: Case) -> dict[str, Any]:
    plain = NETWORKS[case.network]().to(DEVICE)
    net = copy.deepcopy(plain)
    x = torch.randn(1, 3, case.side, case.side, device=DEVICE)
    with case.cast():
        whole = make_plan(net, x, budget="10TiB", device="cuda").plain_bytes
    fixed = sum(2 * p.nbytes for p in net.parameters()) + sum(b.nbytes for b in net.buffers())
    plan, planning = planned(case, net, x, int(fixed + case.share * whole))
    tiled = TiledModule(net, plan=plan)
    steps = {True: lambda: case.step(tiled, x), False: lambda: case.step(plain, x)}
    peaks = {}
    for ours, module in ((True, net), (False, plain)):
        steps[ours]()
        peaks[ours] = peak(steps[ours], module)
    times = {ours: max(1, round(LEAST / timed(run))) for ours, run in steps.items()}
    both = []
    for i in range(PAIRS):
        found = {ours: timed(steps[ours], times[ours]) for ours in ((True, False) if i % 2 else (False, True))}
        both.append((found[False], found[True]))
    return {
        **of_plan(plan),
        "plain_bytes": whole,
        "plan_seconds": planning,
        "peak": peaks[True],
        "plain_peak": peaks[False],
        "own_peak": tiled.peak_bytes,
        "plain_seconds": statistics.median(p for p, _ in both),
        "tiled_seconds": statistics.median(t for _, t in both),
        "ratio": statistics.median(t / p for p, t in both),
        "ratios": [t / p for p, t in both],
    }


def tiny(side: int = 2048, grids: tuple[int, ...] = (1, 2, 4, 8, 16)) -> dict[str, Any]:
    """Seconds of a step of ResNet-18 on n×n tiles, of plain PyTorch's."""
    case = Case("resnet18_frozen", side, 0)
    plain = NETWORKS[case.network]().to(DEVICE)
    x = torch.randn(1, 3, side, side, device=DEVICE)
    case.step(plain, x)
    base = timed(lambda: case.step(plain, x), 10)
    found: dict[str, Any] = {"plain_seconds": base}
    for n in grids:
        tiled = TiledModule(plain, tiles=(n, n))
        case.step(tiled, x)
        found[f"{n}x{n}"] = timed(lambda: case.step(tiled, x), 3 if n < 8 else 1) / base  # noqa: B023
    return found


def large(case: Case, gibibytes: int) -> dict[str, Any]:
    net = NETWORKS[case.network]().to(DEVICE)
    halved = case.network == "vgg16"  # parameters too
    kind = torch.bfloat16 if halved or case.side > 20000 else torch.float32  # a larger image has no room in float32
    x = torch.empty(1, 3, case.side, case.side, device=DEVICE, dtype=torch.bfloat16).uniform_(-1, 1).to(kind)
    net = net.to(torch.bfloat16) if halved else net
    plan, planning = planned(case, net, x, gibibytes * 2**30)
    tiled = TiledModule(net, plan=plan)
    seconds: list[float] = []
    most = peak(lambda: seconds.append(timed(lambda: case.step(tiled, x))), net)
    return {**of_plan(plan), "plan_seconds": planning, "peak": most, "seconds": seconds[0], "image_bytes": x.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["pairs", "tiles", "large"], help="pairs, tiles, large")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of cases")
    parser.add_argument("--minutes", type=float, default=10, help="after which no case is begun (default: 10)")
    parser.add_argument("--rest", action="store_true", help="only cases that this device and PyTorch have not made")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(
            f"PyTorch {torch.__version__} sees no CUDA device here. With a card in the machine, install the wheel for "
            "its driver (https://pytorch.org/get-started); what needs no card is `python -m benchmarks`"
        )
    console = Console()
    begin = time.perf_counter()
    rates = calibrate(DEVICE)
    console.print(rates)
    keep_case("gpu", "rates", asdict(rates))
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    if "tiles" in options.parts:
        work.append(("tiny tiles", tiny))
    if "pairs" in options.parts:
        work += [(c.name, lambda c=c: pair(c)) for c in PAIRED]  # type: ignore[misc]
    if "large" in options.parts:
        work += [(f"large {c.name} {gib} GiB", lambda c=c, gib=gib: large(c, gib)) for c, gib in LARGE]  # type: ignore[misc]
    work = [w for w in work if any(part in w[0] for part in options.only)]
    work = [w for w in work if not (options.rest and made_here(w[0]))]
    for place, (name, run) in enumerate(work):
        spent = time.perf_counter() - begin
        if spent > 60 * options.minutes:
            names = ", ".join(name for name, _ in work[place:])
            console.print(f"{spent / 60:.0f} minutes are over; left for --rest: {names}", markup=False)
            break
        console.print(f"{place + 1} of {len(work)}, {format_seconds(spent)} so far: {name}", markup=False)
        torch.cuda.empty_cache()
        found = run()
        console.print(name, {k: v for k, v in found.items() if k not in ("ratios", "plan")})
        keep_case("gpu", name, found)


def made_here(name: str) -> bool:
    """True where a case was measured on this device with this PyTorch."""
    path = RESULTS / "gpu.json"
    case = json.loads(path.read_text())["cases"].get(name, {}) if path.exists() else {}
    return case.get("machine") == machine()


if __name__ == "__main__":
    main()
