"""The largest square image that one training step of VGG-16's convolutional part takes under a memory limit.

    python -m benchmarks.largest_image [--limit 1GiB] [--prove 2048 8192]

Plain PyTorch, `checkpoint_sequential` and `save_on_cpu` are run on tensors without data under a ledger, and the largest
side within the limit is found by halving: nothing is computed, so that the figure is exact and takes seconds. Ours is
planned, and the time of a step predicted. `--prove` runs one real step of ours at each side, and writes what it really
held (8192 takes half an hour). `--predict` finds no sizes again, and only predicts the times of those there are.
Writes benchmarks/results/largest_image.json and docs/figures/largest-image.png.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.against_plain import step, vgg16
from benchmarks.keep import FIGURES, keep
from lightning_plugin import BudgetError, TiledModule, make_plan
from lightning_plugin.ledger import Ledger
from lightning_plugin.planner.search.policies import AUTO, Policy
from lightning_plugin.units import format_bytes, parse_bytes
from tests.conftest import RESULTS
from tests.lightning_plugin.planner.peaks import CLEAR, of_status, warm_up

UNIT = 32
#: Sides of ours beyond this are planned and not tried.
LARGEST = 131072


def plainly(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)  # type: ignore[no-any-return]


def checkpointed(segments: int) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        # A segment must not begin with a ReLU in place, which would overwrite what is kept of it.
        layers: list[nn.Module] = []
        for layer in net.features:  # type: ignore[union-attr]
            if isinstance(layer, nn.ReLU):
                layers[-1] = nn.Sequential(layers[-1], layer)
            else:
                layers.append(layer)
        return checkpoint_sequential(nn.Sequential(*layers), segments, x, use_reentrant=False).mean((2, 3))

    return run


def peak(run: Callable[[nn.Module, Tensor], Tensor], side: int, saved_away: bool = False) -> int:
    """The most that a step holds: parameters, gradients, activations; the image is the user's own."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        net, x = vgg16(), torch.empty(1, 3, side, side)
        ledger = Ledger(fakes=True)
        ledger.ignore(x)
        for p in net.parameters():
            ledger.count(p)
        ledger.begin()

        def pack(t: Tensor) -> Any:
            # What is saved goes to another device's memory, and comes back as a copy. Parameters stay where they are.
            if isinstance(t, nn.Parameter):
                return t
            return t.shape, t.dtype

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else torch.empty(packed[0], dtype=packed[1])

        away = torch.autograd.graph.saved_tensors_hooks(pack, unpack) if saved_away else nullcontext()
        with ledger.watcher:
            with away:
                loss = run(net, x).sum()
            loss.backward()
        return ledger.peak


def largest(fits: Callable[[int], bool], limit: int = LARGEST, unit: int = UNIT, parts: int = 32) -> int:
    """The largest side that fits, in units and to one of ``parts``, by doubling and halving."""
    low, high = 0, 4
    while high * unit <= limit and fits(high * unit):
        low, high = high, 2 * high
    if high * unit > limit:
        return low * unit
    while high - low > max(1, low // parts):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit


def planned(limit: int, disk: bool = True, policy: Policy = AUTO) -> Callable[[int], bool]:
    """A test of a side: true where its step can be planned; nothing is allocated."""
    with torch.device("meta"):
        net = vgg16()

    def fits(side: int) -> bool:
        try:
            make_plan(net, (1, 3, side, side), budget=limit, disk=disk, policy=policy)
        except BudgetError:
            return False
        return True

    return fits


#: Which of the ways are ours, and whether they have a disk.
OURS = {"ours, memory only": False, "ours, with disk": True}


def predictions(sides: dict[str, int], limit: int) -> dict[str, dict[str, float]]:
    """Predicted time of a step of ours at its largest side, and the time of planning it."""
    with torch.device("meta"):
        net = vgg16()
    found = {}
    for name, disk in OURS.items():
        side, begin = sides[name], time.process_time()
        plan = make_plan(net, (1, 3, side, side), budget=limit, disk=disk)
        found[name] = {"step_seconds": plan.seconds, "plan_seconds": time.process_time() - begin}
    return found


def rows(limit: int) -> dict[str, int]:
    ways: dict[str, Callable[[int], bool]] = {
        "plain PyTorch": lambda side: peak(plainly, side) <= limit,
        **{
            f"checkpoint_sequential, {n} segments": lambda side, n=n: peak(checkpointed(n), side) <= limit  # type: ignore[misc]
            for n in (2, 3, 4, 5, 6, 8)
        },
        "save_on_cpu, a GPU and its host": lambda side: peak(plainly, side, saved_away=True) <= limit,
        **{name: planned(limit, disk=disk) for name, disk in OURS.items()},
    }
    return {name: largest(fits) for name, fits in track(list(ways.items()), description="largest images")}


def prove(side: int, limit: int) -> dict[str, Any]:
    """One real step: what the ledger counted, and what the process took beyond what it held before."""
    begin = time.process_time()
    plan = make_plan(vgg16(), (1, 3, side, side), budget=limit)
    planning = time.process_time() - begin
    tiled = TiledModule(vgg16(), plan=plan)
    image = torch.randn(1, 3, side, side)
    warm_up()
    baseline = of_status("VmRSS")
    CLEAR.write_text("5")
    begin = time.perf_counter()
    step(tiled, image)
    seconds = time.perf_counter() - begin
    over = of_status("VmHWM") - baseline
    return {
        "side": side,
        "peak_bytes": tiled.peak_bytes,
        "process_bytes": over,
        "seconds": seconds,
        "plan_seconds": planning,
        "predicted_seconds": plan.seconds,
        "threads": torch.get_num_threads(),
    }


def predicted(side: int, limit: int) -> float:
    """Seconds of a step of ours, as far as the plan says."""
    return make_plan(vgg16(), (1, 3, side, side), budget=limit).seconds


def draw(found: dict[str, int], limit: int) -> None:
    names = list(found)
    figure, axis = plt.subplots(figsize=(7.5, 0.5 * len(names) + 1.2), layout="constrained")
    colours = ["#2a7f62" if n.startswith("ours") else "#8a94a6" for n in names]
    bars = axis.barh(names, [found[n] for n in names], color=colours)
    axis.bar_label(bars, [f"{found[n]:,}²" + (" and more" if found[n] >= LARGEST else "") for n in names], padding=4)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(right=max(found.values()) * 3)
    axis.set_xlabel("pixels on a side")
    axis.set_title(f"Largest image for a training step of VGG-16 under {format_bytes(limit)}", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURES / "largest-image.png", dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="1GiB")
    parser.add_argument("--prove", type=int, nargs="*", default=[], help="sides of real steps of ours")
    parser.add_argument("--predict", action="store_true", help="only predict the times of the sizes there are")
    options = parser.parse_args()
    limit = parse_bytes(options.limit)
    if options.predict:
        known = json.loads((RESULTS / "largest_image.json").read_text())["values"]
        found, limit = known["sides"], known["limit"]
        proofs = [{**p, "predicted_seconds": predicted(p["side"], limit)} for p in known["proofs"]]
    else:
        found = rows(limit)
        proofs = [prove(side, limit) for side in options.prove]
        draw(found, limit)
    times = predictions(found, limit)
    values = {"limit": limit, "sides": found, "largest tried": LARGEST, "proofs": proofs, "predictions": times}
    keep("largest_image", values)
    table = Table("way", "side", "hours of a step, predicted")
    for name, side in found.items():
        hours = f"{times[name]['step_seconds'] / 3600:.1f}" if name in times else "–"
        table.add_row(name, f"{side}" + (" and more" if side >= LARGEST else ""), hours)
    Console().print(table, *proofs)


if __name__ == "__main__":
    main()
