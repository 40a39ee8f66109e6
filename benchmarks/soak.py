"""A training of thousands of steps at random sizes, with recipes, maps on the disk and streamed parameters:
`python -m benchmarks.load steps`.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.progress import track
from torch import nn

from lightning_plugin import LazyImage, TiledModule

#: A training is looked at so often.
MARKS = 50
MIB = 2**20


class Net(nn.Module):
    """Convolutions whose maps go to the disk, and wide layers that are worth streaming."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3, 1, 1), nn.BatchNorm2d(16),
            nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(),
        )  # fmt: skip
        wide = (layer for _ in range(6) for layer in (nn.Linear(24, 6000), nn.ReLU(), nn.Linear(6000, 24)))
        self.wide, self.head = nn.Sequential(*wide), nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.body(x).mean((2, 3))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Held:
    """What a process holds at a moment."""

    ledger: int
    resident: int
    disk: int
    files: int
    threads: int
    left: int

    @staticmethod
    def now(tiled: TiledModule, folder: Path) -> Held:
        gc.collect()
        process, ledger = psutil.Process(), tiled.settings.ledger
        left = [p for p in folder.rglob("*") if p.is_file()]
        return Held(
            0 if ledger is None else ledger.live,
            process.memory_info().rss,
            sum(p.stat().st_size for p in left),
            process.num_fds(),
            threading.active_count(),
            len(left),
        )


@dataclass(frozen=True)
class Mark:
    """What a process holds after so many steps, and seconds of the processor and of the clock before and after it was
    looked at."""

    step: int
    held: Held
    before: float
    after: float
    clock_before: float
    clock_after: float

    @staticmethod
    def now(step: int, tiled: TiledModule, folder: Path) -> Mark:
        before, clock = time.process_time(), time.monotonic()
        return Mark(step, Held.now(tiled, folder), before, time.process_time(), clock, time.monotonic())


def steps(count: int, budget: str, folder: Path, minutes: float | None) -> dict[str, Any]:
    """A training at random sizes; the sizes of the first tenth are those of the others. It may be cut short, and says
    how many steps there were."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, rng = Net(), random.Random(0)
    tiled = TiledModule(net, budget=budget, disk=str(folder), parameters="disk")
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    peaks, plans, marks = [], set(), [Mark.now(0, tiled, folder)]
    every, asked, ends = max(1, count // MARKS), count, None if minutes is None else time.monotonic() + 60 * minutes
    for i in track(range(count), "training"):
        image = torch.randn(1, 3, rng.randrange(120, 400), rng.randrange(120, 400))
        loss = nn.functional.cross_entropy(tiled(LazyImage(image)), torch.tensor([i % 2]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert tiled.plan is not None and tiled.peak_bytes <= tiled.plan.budget  # type: ignore[operator]
        assert bool(loss.isfinite())
        peaks.append(tiled.peak_bytes)
        plans.add(tuple((s.forward.counts, s.tier) for s in tiled.plan.segments))
        del loss, image
        if (i + 1) % every == 0:
            marks.append(Mark.now(i + 1, tiled, folder))
            if ends is not None and time.monotonic() > ends:
                break
    tenth = MARKS // 10
    early, late = marks[tenth], marks[-1]
    return {
        "steps": late.step,
        "steps asked for": asked,
        "budget": budget,
        "plans": len(plans),
        "tiers": sorted({tier for plan in plans for _, tier in plan}),
        "streamed": len(tiled.plan.on_disk) if tiled.plan is not None else 0,
        "largest peak, MiB": max(peaks) / MIB,
        "after a tenth": vars(early.held),
        "at the end": vars(late.held),
        "growth of the process, MiB": (late.held.resident - early.held.resident) / MIB,
        "ms of a step, second tenth": ms_of(marks[tenth], marks[2 * tenth]),
        "ms of a step, last tenth": ms_of(marks[-1 - tenth], late),
        "over steps": [
            {
                "step": b.step,
                "resident MiB": b.held.resident / MIB,
                "ms": ms_of(a, b),
                "ms by the clock": clock_of(a, b),
            }
            for a, b in itertools.pairwise(marks)
        ],
    }


def ms_of(a: Mark, b: Mark) -> float:
    """Of the processor, for a step between two marks."""
    return 1000 * (b.before - a.after) / (b.step - a.step)


def clock_of(a: Mark, b: Mark) -> float:
    """By the clock: the machine may have had other work."""
    return 1000 * (b.clock_before - a.clock_after) / (b.step - a.step)
