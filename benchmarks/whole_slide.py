"""One training step on a whole slide from its store: `python -m benchmarks.whole_slide [SIDE ...] [--budget 1GiB]`.

    python -m benchmarks.whole_slide [4000 8000 16000 32000 50000] [--background 0.8] [--modes train frozen]

A synthetic slide of which four fifths are background is written by `wsi-train preprocess`'s own converter, a shard at a
time, with its background constant: its store knows the background without reading it. On that a ResNet-18 of half width
takes one step (forward, cross-entropy, backward) within the budget, with its BatchNorms in train mode or frozen; all of
its parameters are trained in both. Each step is a process of its own, on one thread, so that the kernel's high-water
mark is this step's; it is planned by rates that are calibrated before, and knows no plans of other runs. Tissue pixels
are those of the mask that the slide was converted with. Seconds are those of the step, without its plan.

The engine refuses a step whose maps might not find room on the disk; then it is said why. Slides are kept in --folder
between runs. Writes benchmarks/results/whole_slide.json, a case for each mode and side as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from benchmarks.calibrated import RATES, calibrated
from benchmarks.keep import keep_case
from benchmarks.table import table
from lightning_plugin import Box, EngineError, LazyImage, Plan, TiledModule
from lightning_plugin.plans import Planner
from lightning_plugin.progress import Kind
from lightning_plugin.residency.disk import OPEN_FILES
from tests.lightning_plugin.planner.peaks import CLEAR, of_status, warm_up
from tests.zoo.resnet import BasicBlock, ResNet
from wsi_trainer.models.slide_model import COLOURS
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide

NAME = "whole_slide"
SIDES = (4_000, 8_000, 16_000, 32_000, 50_000)
MODES = ("train", "frozen")
WIDTH = 0.5
FOLDER = Path(tempfile.gettempdir()) / "whole_slide"
#: Positions of a ResNet-18's last map see so many pixels on each side of their own, in cells of some pixels.
REACH, CELL = 217, 50
#: Seconds between looks at the disk.
EVERY = 0.5


class Network(nn.Module):
    """A ResNet-18 of half width, from the pixels of a slide to four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet(BasicBlock, (2, 2, 2, 2), width_mult=WIDTH, num_classes=4)
        self.mean, self.deviation = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in COLOURS)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net((pixels.float() - self.mean) / self.deviation)  # type: ignore[no-any-return]


class Heard:
    """Progress of a step: tiles, as they are done, and the seconds that it waited."""

    def __init__(self, bar: Progress, what: str) -> None:
        self.bar, self.row = bar, bar.add_task(what, total=None)
        self.tiles = self.shared = 0
        self.waited = {"input": 0.0, "spill": 0.0}
        self.planning = [0.0, 0.0]
        self.plan: Plan | None = None
        self.on_disk, self.looked = 0, 0.0

    def on_tiles(self, count: int) -> None:
        self.tiles += count
        self.bar.update(self.row, advance=count)
        if time.monotonic() - self.looked > EVERY:
            self.looked = time.monotonic()
            self.on_disk = max(self.on_disk, sum(file.file.allocated_bytes for file in list(OPEN_FILES)))

    def on_identical_tiles(self, count: int) -> None:
        self.shared += count

    def on_wait(self, kind: Kind, seconds: float) -> None:
        self.waited[kind] += seconds

    @contextmanager
    def timing(self) -> Iterator[None]:
        """A block in which planning is timed, and tells how many tiles are to come."""
        search = Planner.search

        def timed(planner: Planner, *args: Any, **kwargs: Any) -> Plan:
            begin = time.perf_counter(), time.process_time()
            plan = self.plan = search(planner, *args, **kwargs)
            self.planning[0] += time.perf_counter() - begin[0]
            self.planning[1] += time.process_time() - begin[1]
            tiled = [s for s in plan.segments if not s.keep]
            self.bar.update(self.row, total=sum(s.forward.tiles + s.backward.tiles for s in tiled))
            return plan

        with patch.object(Planner, "search", timed):
            yield


def make_store(folder: Path, side: int, background: float) -> Path:
    """The store of a slide, made unless it is there."""
    name = f"{side}-{background:g}"
    store = folder / f"{name}.zarr"
    if not store.exists():
        folder.mkdir(parents=True, exist_ok=True)
        slide = folder / f"{name}.tif"
        with bar() as shown:
            row = shown.add_task(f"slide of {side:,}²", total=side * side)
            spec = SlideSpec(side, side, seed=1, tissue=1 - background)
            write_slide(slide, spec, progress=lambda pixels: shown.update(row, advance=pixels))
            row = shown.add_task(f"store of {side:,}²", total=side * side)
            convert(
                Job(slide, name),
                folder,
                Settings(background="constant"),
                progress=lambda done, total: shown.update(row, completed=done),
            )
        slide.unlink()
    return store


def bar() -> Progress:
    """Progress with the time that is left."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        refresh_per_second=1,
    )  # fmt: skip


def known_background(source: Image) -> float:
    """The part of a slide's blocks that its source knows to be background."""
    return float(1 - unknown(source, source.block).mean())


def unknown(source: Image, size: int) -> Tensor:
    """The cells of some pixels of a slide: one where a source does not know that it is background, else zero."""
    side = source.shape[2]
    ends = [(lo, min(lo + size, side)) for lo in range(0, side, size)]
    known = [[source.constant(Box((top, left), (low, right))) is not None for left, right in ends] for top, low in ends]
    return 1 - torch.tensor(known, dtype=torch.float64)


def seeing(source: Image) -> float:
    """The part of a slide from which the network sees tissue: no further from what may be tissue than half of what a
    position of its last map sees."""
    reach = round(REACH / CELL)
    return float(nn.functional.max_pool2d(unknown(source, CELL)[None], 2 * reach + 1, 1, reach).mean())


def step(store: Path, mode: str, budget: str) -> dict[str, Any]:
    """One step in this process, and what it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = Image(Slide.open(store))
    facts = json.loads((store / "manifest.json").read_text())["settings"]["facts"]
    side, tissue = source.shape[2], facts["tissue"] * source.shape[2] * source.shape[3]
    values = {
        "side": side,
        "mode": mode,
        "budget": budget,
        "rates": RATES,
        "background": round(1 - facts["tissue"], 4),
        "known_background": round(known_background(source), 4),
        "seeing": round(seeing(source), 4),
        "tissue_pixels": round(tissue),
    }
    net = Network().train(mode == "train")
    tiled = TiledModule(net, budget=budget)
    warm_up()
    baseline = of_status("VmRSS")
    CLEAR.write_text("5")
    with bar() as shown:
        heard = Heard(shown, f"{mode}, {side:,}²")
        tiled.engine.progress.listeners.append(heard)
        with heard.timing():
            wall, busy = time.perf_counter(), time.process_time()
            try:
                loss = nn.functional.cross_entropy(tiled(LazyImage(source)), torch.tensor([1]))
                loss.backward()
            except EngineError as refused:
                return {**values, **planned(heard), "refused": str(refused).replace(tempfile.gettempdir(), "/tmp")}
            wall, busy = time.perf_counter() - wall, time.process_time() - busy
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    wall, busy = wall - heard.planning[0], busy - heard.planning[1]
    return {
        **values,
        **planned(heard),
        "loss": loss.item(),
        "seconds": round(wall, 1),
        "processor_seconds": round(busy, 1),
        "seconds_per_million": round(busy / tissue * 1e6, 3),
        "input_seconds": round(heard.waited["input"], 2),
        "spill_seconds": round(heard.waited["spill"], 2),
        "ledger_bytes": tiled.peak_bytes,
        "process_bytes": of_status("VmHWM") - baseline,
        "disk_bytes": heard.on_disk,
        "tiles": heard.tiles,
        "shared_tiles": heard.shared,
        "load": round(os.getloadavg()[0], 1),  # with more than there are processors, seconds on the clock mean little
    }


def planned(heard: Heard) -> dict[str, Any]:
    """Figures of the plan of a step, and the time of planning it."""
    plan = heard.plan
    assert plan is not None
    return {
        "predicted_seconds": round(plan.seconds, 1),
        "plan_seconds": round(heard.planning[1], 1),
        "planned_bytes": plan.peak_bytes,
        "planned_disk_bytes": sum(s.forecast.stored_bytes for s in plan.segments if s.tier == "disk"),
        "plain_bytes": plan.plain_bytes,
        "segments": len(plan.segments),
        "recompute": round(plan.recompute, 3),
    }


def alone(store: Path, mode: str, budget: str) -> None:
    """A step in a process of its own, which finds the processor's rates in a cache, and no plans."""
    command = [sys.executable, "-m", "benchmarks.whole_slide", f"--budget={budget}", f"--step={mode}", str(store)]
    with calibrated():
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


COLUMNS = [
    "seconds", "processor_seconds", "seconds_per_million", "predicted_seconds", "input_seconds", "ledger_bytes",
    "process_bytes", "disk_bytes", "refused",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="*", metavar="SIDE", help=f"default: {' '.join(map(str, SIDES))}")
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--background", type=float, default=0.8, help="the part of a slide that is background")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of the BatchNorms")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where slides are kept")
    parser.add_argument("--step", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        values = step(Path(options.sides[0]), options.step, options.budget)
        keep_case(NAME, f"{values['mode']} {values['side']}", values)
        return
    torch.set_num_threads(1)  # rates are those of as many
    for side in sorted(map(int, options.sides or SIDES)):
        store = make_store(options.folder, side, options.background)
        for mode in options.modes:
            alone(store, mode, options.budget)
            print(table(NAME, COLUMNS))


if __name__ == "__main__":
    main()
