"""The viewer: how soon a large slide shows, and what a thousand pans and zooms over many slides take.

The command runs as a user starts it, in a process of its own whose memory is watched; requests are those of a browser
with a window of 1400 × 860 pixels and six connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from rich.console import Console
from rich.progress import track

from benchmarks.keep import keep
from wsi_trainer.synthetic import generate
from wsi_trainer.synthetic.pyramid import write_pyramid

WINDOW = (860, 1400)
TILE = 512
CONNECTIONS = 6
MIB = 2**20


def sparse_slide(path: Path, side: int) -> Path:
    """A slide of `side` × `side` pixels, one block of 1024 × 1024 in 16 with noise and the others background."""
    noise = np.random.default_rng(0).normal((190, 120, 180), 25, (1024, 1024, 3)).clip(0, 255).astype(np.uint8)
    background = np.array([243, 242, 244], np.uint8)

    def render(y: int, x: int, height: int, width: int) -> np.ndarray:
        if (y // 1024 * 5 + x // 1024) % 16 == 0:
            return noise[:height, :width]
        return np.broadcast_to(background, (height, width, 3))

    write_pyramid(path, render, (side, side), mpp=0.25, threads=2)
    return path


def cohort(folder: Path, slides: int, side: int, files: int) -> Path:
    """A folder of slides; files are linked under several names, which the viewer opens as different slides."""
    manifest = generate(folder / "made", slides=min(files, slides), shape=(side, side), seed=1, workers=2)
    made = sorted((manifest.parent / "slides").glob("*.tif"))
    shown = folder / "slides"
    shown.mkdir()
    for number in range(slides):
        (shown / f"slide_{number:03}.tif").hardlink_to(made[number % len(made)])
    return shown


@contextlib.contextmanager
def server(what: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The command, running; its address and its process."""
    command = [sys.executable, "-m", "wsi_trainer", "view", str(what), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://127\S+", line)))
            yield address.rstrip("/"), psutil.Process(process.pid)
        finally:
            process.terminate()


@dataclass
class Visit:
    """Counts and times of a session."""

    processor: float = 0.0

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


async def get(session: aiohttp.ClientSession, address: str, visit: Visit) -> bytes:
    began = time.perf_counter()
    async with session.get(address) as answer:
        body = await answer.read()
    visit.seconds.append(time.perf_counter() - began)
    if answer.status != 200:
        visit.failures.append(f"{answer.status} {address}")
    return body


def tiles_of(about: dict[str, Any], chance: random.Random) -> list[str]:
    """The tiles of a window at a random place and zoom."""
    level = chance.randint(0, about["coarsest"])
    sides = [-(-about[name] // 2**level) for name in ("height", "width")]
    spans = []
    for side, window in zip(sides, WINDOW):
        start = chance.randrange(max(1, side - window))
        spans.append(range(start // TILE, -(-min(start + window, side) // TILE)))
    return [f"tiles/{level}/{row}-{column}.jpg" for row in spans[0] for column in spans[1]]


async def first_tile(address: str) -> dict[str, float]:
    """Seconds from the choice of a slide that nobody has opened to what the page shows first."""
    visit = Visit()
    async with aiohttp.ClientSession() as session:
        about = json.loads(await get(session, f"{address}/slides/0/about.json", visit))
        await get(session, f"{address}/slides/0/tiles/{about['coarsest']}/0-0.jpg", visit)
        overview = sum(visit.seconds)
        middle = about["width"] // 2 // TILE
        await get(session, f"{address}/slides/0/tiles/0/{middle}-{middle}.jpg", visit)
        tissue = Visit()
        await get(session, f"{address}/slides/0/layers/tissue/about.json", tissue)
    assert not visit.failures and not tissue.failures, visit.failures + tissue.failures
    return {"first_tile": overview, "full_resolution_tile": visit.seconds[-1], "tissue": tissue.seconds[0]}


async def wander(address: str, process: psutil.Process, moves: int, slides: int) -> Visit:
    """Pans and zooms over all slides in a random order."""
    visit, chance = Visit(), random.Random(0)
    abouts: dict[int, dict[str, Any]] = {}
    began = sum(process.cpu_times()[:2])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:
        for move in track(range(moves), description="moves"):
            slide = chance.randrange(slides)
            place = f"{address}/slides/{slide}"
            if slide not in abouts:
                abouts[slide] = json.loads(await get(session, f"{place}/about.json", visit))
            await asyncio.gather(*(get(session, f"{place}/{one}", visit) for one in tiles_of(abouts[slide], chance)))
            if move % 10 == 9:
                visit.memory.append(process.memory_info().rss / MIB)
    visit.processor = sum(process.cpu_times()[:2]) - began
    return visit


def summary(visit: Visit, moves: int, slides: int, side: int) -> dict[str, Any]:
    seconds, memory = np.array(visit.seconds), np.array(visit.memory)
    tenth = max(1, len(memory) // 10)
    return {
        "slides": slides,
        "side": side,
        "moves": moves,
        "requests": len(seconds),
        "failures": len(visit.failures),
        "processor_s_by_request": visit.processor / len(seconds),
        "median_s": float(np.median(seconds)),
        "p99_s": float(np.quantile(seconds, 0.99)),
        "slowest_s": float(seconds.max()),
        "memory_mib_by_tenths": [round(float(part.mean()), 1) for part in np.split(memory[: 10 * tenth], 10)],
        "memory_mib_peak": float(memory.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.view", description=__doc__)
    parser.add_argument("--side", type=int, default=100_000, help="of the large slide")
    parser.add_argument("--slides", type=int, default=50)
    parser.add_argument("--files", type=int, default=5, help="different files among the slides")
    parser.add_argument("--cohort_side", type=int, default=8192)
    parser.add_argument("--moves", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        large = sparse_slide(folder / "large.tif", options.side)
        with server(large) as (address, _):
            first = asyncio.run(first_tile(address))
        Console().print(first)
        shown = cohort(folder, options.slides, options.cohort_side, options.files)
        with server(shown) as (address, process):
            visit = asyncio.run(wander(address, process, options.moves, options.slides))
    values = {
        "large": {"side": options.side, **first},
        "wander": summary(visit, options.moves, options.slides, options.cohort_side),
    }
    Console().print(values)
    keep("view", values)


if __name__ == "__main__":
    main()
