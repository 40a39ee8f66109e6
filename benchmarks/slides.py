"""How fast slides are read and converted, against what decoding and encoding alone cost.

    python -m benchmarks.slides --work DIR [--side 8192]

writes benchmarks/results/slides.json and the pictures docs/figures/slides-*.png. Rates are megabytes of pixels
for each second of processor time, which other work on the machine disturbs little, and of wall time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from rich.console import Console
from rich.table import Table

from benchmarks.slides_picture import draw
from lightning_plugin import Box
from wsi_trainer.fit.environment import environment
from wsi_trainer.slides.convert import Job, convert
from wsi_trainer.slides.readers import open_reader
from wsi_trainer.slides.settings import Settings
from wsi_trainer.slides.source import SlideSource
from wsi_trainer.slides.store.codec import ZstdCodec
from wsi_trainer.slides.store.level import StoredLevel
from wsi_trainer.slides.store.shard import ABSENT
from wsi_trainer.synthetic import SlideSpec, write_slide

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "slides.json"
Read = Callable[[int, int, int], Any]
"""Reads the square tile of a size at (y, x)."""


@dataclass(frozen=True)
class Rate:
    """Megabytes a second of one way to do one thing."""

    what: str
    tile: int
    threads: int
    per_cpu: float
    per_wall: float


def measure(what: str, tile: int, threads: int, jobs: Iterable[Callable[[], int]], repeats: int = 2) -> Rate:
    """The best of a few runs over jobs that return how many bytes of pixels they made."""
    todo = list(jobs)
    best = (0.0, 0.0)
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(threads) as pool:
            size = sum(pool.map(lambda job: job(), todo))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        best = (max(best[0], size / 1e6 / cpu), max(best[1], size / 1e6 / wall))
    return Rate(what, tile, threads, *(round(value, 1) for value in best))


def tiles(side: int, size: int) -> list[tuple[int, int]]:
    """All aligned tiles in a random order: every reader, size and decoder meets the same pixels once."""
    places = [(y, x) for y in range(0, side, size) for x in range(0, side, size)]
    return [places[i] for i in np.random.default_rng(0).permutation(len(places))]


def decoders(slide: Path, level: StoredLevel, side: int) -> list[tuple[str, list[Callable[[], int]]]]:
    """Decoding alone: the compressed tiles lie in memory, nothing is looked up, copied or put together."""
    with tifffile.TiffFile(slide) as tif:
        page = tif.pages[0]
        spans = list(zip(page.dataoffsets, page.databytecounts))
    data = slide.read_bytes()
    order = np.random.default_rng(0).permutation(len(spans))
    jpegs = [data[o : o + n] for o, n in (spans[i] for i in order)]
    chunks = []
    for row in range(side // level.layout.shard):
        for column in range(side // level.layout.shard):
            index, shard = level.index(row, column), level.shard_path(row, column)
            if index is not None:
                raw = shard.read_bytes()
                spots = index.reshape(-1, 2)
                chunks += [raw[int(o) : int(o) + int(n)] for o, n in spots if o != ABSENT]
    codec, size = ZstdCodec(), level.layout.chunk
    # Into memory that is there already: new memory for each tile costs up to half of decoding it.
    kept = threading.local()

    def buffer(*shape: int) -> np.ndarray:
        if not hasattr(kept, "buffer"):
            kept.buffer = np.empty(3 * size * size, np.uint8)
        return kept.buffer[: math.prod(shape)].reshape(shape)

    side_of_tile = page.tilewidth
    return [
        (
            "JPEG alone",
            [lambda j=j: imagecodecs.jpeg8_decode(j, out=buffer(side_of_tile, side_of_tile, 3)).nbytes for j in jpegs],
        ),
        ("zstd alone", [lambda c=c: codec.decode(c, buffer(3, size, size)).nbytes for c in chunks]),
    ]


def readers(slide: Path, store: Path, level: StoredLevel) -> dict[str, Read]:
    """Every way to read a tile."""
    fast, openslide = open_reader(slide, "tiff"), open_reader(slide, "openslide")
    sources = {name: SlideSource(path, cache=0, threads=1) for name, path in (("slide", slide), ("store", store))}
    import zarr

    array: Any = zarr.open_array(store / "0", mode="r")
    found: dict[str, Read] = {
        "TIFF, OpenSlide": lambda y, x, size: openslide.read(0, y, x, size, size),
        "TIFF, tifffile": lambda y, x, size: fast.read(0, y, x, size, size),
        "TIFF, SlideSource": lambda y, x, size: sources["slide"].read(Box((y, x), (y + size, x + size))),
        "zarr, zarr-python": lambda y, x, size: array[:, y : y + size, x : x + size],
        "zarr, ours": lambda y, x, size: level.read(y, x, size, size),
        "zarr, SlideSource": lambda y, x, size: sources["store"].read(Box((y, x), (y + size, x + size))),
    }
    try:
        import tensorstore
    except ImportError:
        return found
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store}/0/"}}
    opened = tensorstore.open(spec, read=True).result()
    found["zarr, tensorstore"] = lambda y, x, size: opened[:, y : y + size, x : x + size].read().result()
    return found


def measure_reading(slide: Path, store: Path, side: int) -> list[Rate]:
    """Rates of all readers at several tile sizes, with one and two threads."""
    shape = (side, side)
    level = StoredLevel(store / "0", shape, Settings().layout)
    rates = [measure(what, 0, threads, jobs) for what, jobs in decoders(slide, level, side) for threads in (1, 2)]
    for what, read in readers(slide, store, level).items():
        for size in (256, 512, 1024, 2048):
            places = tiles(side, size)
            jobs = [lambda y=y, x=x, size=size, read=read: _read(read, y, x, size) for y, x in places]
            rates += [measure(what, size, threads, jobs) for threads in (1, 2)]
    return rates


def _read(read: Read, y: int, x: int, size: int) -> int:
    read(y, x, size)
    return 3 * size * size


def measure_converting(slide: Path, work: Path, side: int) -> list[Rate]:
    """Conversion against decoding every tile and encoding every chunk of every level, and nothing else."""
    whole = side * side * 3
    reader, codec = open_reader(slide, "tiff"), ZstdCodec()

    def floor(y: int, x: int) -> int:
        pixels = np.ascontiguousarray(np.moveaxis(reader.read(0, y, x, 512, 512), 2, 0))
        codec.encode(pixels)
        if (y // 512) % 2 == 0 and (x // 512) % 2 == 0:  # a chunk of the next level for each four; the rest is 1/12
            codec.encode(np.ascontiguousarray(pixels))
        return pixels.nbytes

    places = [(y, x) for y in range(0, side, 512) for x in range(0, side, 512)]
    rates = []
    for threads in (1, 2):
        jobs = [lambda y=y, x=x: floor(y, x) for y, x in places]
        rates.append(measure("decode + encode alone", 512, threads, jobs, repeats=2))

        def run(threads: int = threads) -> int:
            settings = Settings(tissue="none")
            convert(Job(slide, f"run{threads}"), work, settings, threads=threads, overwrite=True)
            (work / f"run{threads}.zarr" / "manifest.json").unlink()
            os.rename(work / f"run{threads}.zarr", work / f"done{time.monotonic_ns()}")
            return whole

        rates.append(measure("wsi-train preprocess", 512, threads, [run], repeats=2))
    return rates


def main() -> None:
    """Measures, prints a table, and writes the record and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--side", type=int, default=8192)
    options = parser.parse_args()
    work, side = options.work, options.side
    work.mkdir(parents=True, exist_ok=True)
    slide = work / f"slide{side}.tif"
    if not slide.exists():
        write_slide(slide, SlideSpec(side, side, tissue=0.6, noise=True), threads=2)
    convert(Job(slide, "slide"), work, Settings(tissue="none"), threads=2)
    rates = measure_reading(slide, work / "slide.zarr", side) + measure_converting(slide, work, side)
    table = Table("what", "tile", "threads", "MB / CPU s", "MB / s")
    for rate in rates:
        table.add_row(rate.what, str(rate.tile or ""), str(rate.threads), f"{rate.per_cpu:.0f}", f"{rate.per_wall:.0f}")
    Console().print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(), "side": side, "rates": [asdict(rate) for rate in rates]}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    draw(record, ROOT / "docs" / "figures" / "slides-reading.png")


if __name__ == "__main__":
    main()
