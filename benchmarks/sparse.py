"""Inference on a slide that is mostly glass: `python -m benchmarks.sparse [SHARE ...] [--budget 512MiB]`.

The image has 100,000 x 80,000 pixels, of which a share is tissue, in three squares; the source knows the rest to be one
value. The network has a GroupNorm, and a gate by the mean of all its positions, so that it needs two passes before the
classes are written, into a Zarr array. Each share runs in a process of its own, in one thread. Its memory is counted
from outside: Python, libraries and source included. Writes benchmarks/results/sparse.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from benchmarks.keep import keep_case
from lightning_plugin import Box, TileSource, infer

SHARES = (0.0001, 0.015, 0.03)
GLASS = 255


class Slide(TileSource):
    """Noise in three squares, and glass."""

    dtype = torch.uint8
    shape = (1, 3, 100_000, 80_000)

    def __init__(self, share: float) -> None:
        side = int((share * self.shape[2] * self.shape[3] / 3) ** 0.5)
        corners = (9_000, 11_000), (40_000, 50_000), (70_000, 20_000)
        self.tissue = [Box((y, x), (y + side, x + side)) for y, x in corners]
        noise = np.random.default_rng(0).integers(0, 256, (3, 1024, 1024), dtype=np.uint8)
        self.noise = torch.from_numpy(noise)

    def constant(self, box: Box) -> Tensor | None:
        apart = all(box.intersect(square).empty for square in self.tissue)
        return torch.full((3,), GLASS, dtype=torch.uint8) if apart else None

    def read(self, box: Box) -> Tensor:
        values = torch.full((1, 3, *box.extent), GLASS, dtype=torch.uint8)
        for inside in (box.intersect(square) for square in self.tissue):
            if not inside.empty:
                (top, left), (bottom, right) = inside.lo, inside.hi
                rows, columns = torch.arange(top, bottom) % 1024, torch.arange(left, right) % 1024
                there = values[0, :, top - box.lo[0] : bottom - box.lo[0], left - box.lo[1] : right - box.lo[1]]
                there[:] = self.noise[:, rows[:, None], columns]
        return values


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.body = nn.Sequential(first, nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.gate, self.last = nn.Linear(8, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x.float() / 255)
        return self.last(x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None])  # type: ignore[no-any-return]


def run(share: float, budget: str, folder: str) -> None:
    """One inference; prints its seconds."""
    torch.set_num_threads(1)
    began, used = time.perf_counter(), time.process_time()
    plan = infer(Net(), Slide(share), Path(folder) / "classes.zarr", output="classes", budget=budget, disk=folder)
    seconds = {"seconds": time.perf_counter() - began, "processor seconds": time.process_time() - used}
    print(json.dumps({**seconds, "planned bytes": plan.peak_bytes}))


def measure(share: float, budget: str) -> dict[str, Any]:
    """An inference in a process of its own, with the most memory that it had."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.sparse", "--run", folder, "--budget", budget, str(share)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        watched, peak = psutil.Process(process.pid), 0
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(process.communicate()[0]))
        reader.start()
        while reader.is_alive():
            try:
                peak = max(peak, watched.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
        reader.join()
        return {**json.loads(said[0].splitlines()[-1]), "process bytes": peak, "share": share, "budget": budget}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shares", nargs="*", type=float, default=SHARES, metavar="SHARE")
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--run", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for share in options.shares:
        if options.run:
            run(share, options.budget, options.run)
        else:
            found = measure(share, options.budget)
            keep_case("sparse", f"{100 * share:g} % tissue", found)
            print(found)


if __name__ == "__main__":
    main()
