"""What splitting a network costs in accuracy: split and stochastic split against exact training, as in Split-CNN.

    python -m benchmarks.split_study [--steps 120] [--seeds 0 1 2] [--minutes 28]

A ResNet-18 with a stem of 3 x 3 and an eighth of its width learns from images made here how a wave is turned: one of
eight directions, one of three wavelengths, any phase, under noise. Of a short wave every place shows the direction; a
wave as long as the image shows it only where much of the image is seen together, across the borders of splits. All
runs of one seed see the same images, begin with the same weights and take as many steps. Evaluation is unsplit, as the
engine's is; what was trained on even splits is evaluated on them, too. Runs go round by round of seeds, no new one
begins after so many minutes, and runs of other seeds that were kept before stay.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.keep import keep_case
from lightning_plugin import Plan, TiledModule, make_plan
from tests.conftest import RESULTS
from tests.zoo.resnet import BasicBlock, ResNet

SIDE, BATCH, TESTED = 32, 64, 1536
WAVES, DIRECTIONS, NOISE = (6, 16, 32), 8, 3.0
DEPTHS, SPLITS, WOBBLE = (0.25, 0.5, 0.75), (2, 3), 0.2


def batch(count: int, dice: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Images, directions, and the places of their wavelengths."""
    direction = torch.randint(DIRECTIONS, (count,), generator=dice)
    place = torch.randint(len(WAVES), (count,), generator=dice)
    angle = direction * (math.pi / DIRECTIONS)
    turns = torch.stack([angle.sin(), angle.cos()], 1) / torch.tensor(WAVES)[place].unsqueeze(1)
    phase = torch.rand(count, 3, 1, 1, generator=dice)
    line = torch.arange(SIDE)
    along = turns[:, 0, None, None] * line.unsqueeze(1) + turns[:, 1, None, None] * line
    x = torch.sin(2 * math.pi * (along.unsqueeze(1) + phase))
    return x + NOISE * torch.randn(x.shape, generator=dice), direction, place


def resnet() -> nn.Module:
    net = ResNet(BasicBlock, (2, 2, 2, 2), width_mult=1 / 8, num_classes=DIRECTIONS)
    stem: Any = net.conv1
    net.conv1 = nn.Conv2d(3, stem.out_channels, 3, padding=1, bias=False)  # type: ignore[assignment]
    net.maxpool = nn.Identity()  # type: ignore[assignment]
    return net


def train(seed: int, steps: int, **options: Any) -> dict[str, Any]:
    """One run: accuracy of all test images, and of those of each wavelength."""
    torch.manual_seed(seed)
    net = resnet()
    step_module = net if not options else TiledModule(net, plan=whole(net, options), **options)
    dice = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    begin = time.process_time()
    for _ in range(steps):
        x, y, _ = batch(BATCH, dice)
        optimizer.zero_grad()
        F.cross_entropy(step_module(x), y).backward()
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - begin
    found = {**tested(copy.deepcopy(net).eval()), "steps": steps, "processor_seconds": seconds}
    if options.get("halo") == "split":
        found["accuracy if split"] = tested(on_splits(net, options))["accuracy"]
    return found


def whole(net: nn.Module, options: dict[str, Any]) -> Plan:
    """The plan that keeps everything: what is studied is the function, which is the same on any tiles."""
    return make_plan(net, (BATCH, 3, SIDE, SIDE), budget="1TiB", **options)


def on_splits(net: nn.Module, options: dict[str, Any]) -> nn.Module:
    """A network that is evaluated as it was trained: its windows are split, its statistics are those it has learnt."""
    net = copy.deepcopy(net).eval()
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            m.train()
    return TiledModule(net, tiles=1, **options)


@torch.no_grad()
def tested(net: nn.Module) -> dict[str, float]:
    x, y, place = batch(TESTED, torch.Generator().manual_seed(1))
    right = torch.cat([net(part).argmax(1) for part in x.split(256)]) == y
    by_wave = {f"accuracy at {w}": right[place == i].float().mean().item() for i, w in enumerate(WAVES)}
    return {"accuracy": right.float().mean().item(), **by_wave}


def runs() -> list[tuple[str, dict[str, Any]]]:
    """What is compared: exact training, and each split in both ways."""
    found: list[tuple[str, dict[str, Any]]] = [("exact", {})]
    for depth, splits, halo in itertools.product(DEPTHS, SPLITS, ("split", "stochastic_split")):
        wobble = {"wobble": WOBBLE} if halo == "stochastic_split" else {}
        found.append((f"{halo} {depth:g} {splits}", {"halo": halo, "split_depth": depth, "splits": splits, **wobble}))
    return found


def kept(name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The runs of other seeds that a former call has left."""
    path = RESULTS / "split_study.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    return [run for run in cases.get(name, {}).get("runs", []) if run["seed"] not in seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=28, help="after so many no run begins")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    found = {name: kept(name, options.seeds) for name, _ in runs()}
    for seed, (name, how) in itertools.product(options.seeds, runs()):
        if time.monotonic() > end:
            break
        found[name].append({"seed": seed, **train(seed, options.steps, **how)})
        print(name, found[name][-1], flush=True)
        keep_case("split_study", name, {"how": how, "runs": found[name]})
    table = Table("training", "seeds", "accuracy", *(f"wave {w}" for w in WAVES))
    for name, made in ((name, made) for name, made in found.items() if made):
        names = ("accuracy", *(f"accuracy at {w}" for w in WAVES))
        table.add_row(name, str(len(made)), *(f"{100 * statistics.mean(m[n] for m in made):.1f}" for n in names))
    Console().print(table)


if __name__ == "__main__":
    main()
