"""Rates of reading and converting slides, against decoding and encoding alone.

    python -m benchmarks.slides [--work DIR] [--side 8192] [--what converting]

writes benchmarks/results/slides.json. Rates are megabytes of pixels
for each second of processor time, which other work on the machine disturbs little, and of wall time. All ways take
turns, so that each meets the same moods of the machine; a rate is the median of its rounds, and what it is of the
codec's own the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_plugin import Box
from wsi_trainer.environment import environment
from wsi_trainer.slide.formats.tiff import tile_room
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store.chunks import ABSENT, StoredLevel, ZstdCodec
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "slides.json"
CONVERTING = ("decode + encode alone", "wsi-train preprocess")
CODECS: dict[str, Settings] = {
    "zarr": Settings(tissue="none"),
}
"""The stores that are read, by the name of their format."""
FLOORS = {"TIFF": "JPEG alone", "zarr": "zstd alone", CONVERTING[1]: CONVERTING[0]}
"""What a way is compared with, by what its name begins with: where it is not here, the name itself."""
ROUNDS = 7
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
    of_floor: float
    """Of the rate for processor time of what the way is compared with."""


Jobs = list[Callable[[], int]]
"""Each returns how many bytes of pixels it has made."""


def timed(threads: int, jobs: Jobs) -> tuple[float, float]:
    """Megabytes for a second of processor time, and of wall time."""
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        size = sum(pool.map(lambda job: job(), jobs))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return size / 1e6 / cpu, size / 1e6 / wall


def in_turns(ways: dict[tuple[str, int], Jobs], threads: int, title: str) -> list[Rate]:
    """The rates of ways, by name and side of the tile."""
    tried: dict[tuple[str, int], list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in track(range(ROUNDS), f"{title}, {threads} thread(s)"):
        for way, jobs in ways.items():
            tried[way].append(timed(threads, jobs))
    rates = []
    for (what, tile), found in tried.items():
        name = what.split(", ")[0]
        floor = next(runs for (other, _), runs in tried.items() if other == FLOORS.get(name, name))
        per_cpu, per_wall = (round(statistics.median(values), 1) for values in zip(*found))
        ratio = statistics.median(mine / its for (mine, _), (its, _) in zip(found, floor))
        rates.append(Rate(what, tile, threads, per_cpu, per_wall, round(ratio, 3)))
    return rates


def tiles(side: int, size: int) -> list[tuple[int, int]]:
    """All aligned tiles in a random order: every reader, size and decoder meets the same pixels once."""
    places = [(y, x) for y in range(0, side, size) for x in range(0, side, size)]
    return [places[i] for i in np.random.default_rng(0).permutation(len(places))]


def compressed_tiles(slide: Path) -> list[bytes]:
    """The tiles of the finest level of a TIFF as they lie in the file."""
    with tifffile.TiffFile(slide) as tif:
        page = tif.pages[0]
        spans = list(zip(page.dataoffsets, page.databytecounts))
    data = slide.read_bytes()
    return [data[start : start + size] for start, size in spans]


def many(pieces: list[Any], decode: Callable[[Any], int], at_once: int = 16) -> Jobs:
    """Jobs of several pieces each: one job for each small piece would cost as much as decoding it."""
    groups = [pieces[start : start + at_once] for start in range(0, len(pieces), at_once)]
    return [partial(total, decode, group) for group in groups]


def total(decode: Callable[[Any], int], group: list[Any]) -> int:
    """The sum over the pieces of a group."""
    return sum(map(decode, group))


def compressed_chunks(level: StoredLevel, side: int) -> list[np.ndarray]:
    """The chunks of a level as they lie in its shards."""
    chunks = []
    for row in range(side // level.layout.shard):
        for column in range(side // level.layout.shard):
            index, shard = level.index(row, column), level.shard_path(row, column)
            if index is not None:
                raw = np.frombuffer(shard.read_bytes(), np.uint8)
                spots = index.reshape(-1, 2)
                chunks += [raw[int(o) : int(o) + int(n)] for o, n in spots if o != ABSENT]
    return chunks


def decoders(slide: Path, levels: dict[str, StoredLevel], side: int) -> list[tuple[str, Jobs]]:
    """Decoding alone: the compressed tiles lie in memory, nothing is looked up, copied or put together."""
    tiles = compressed_tiles(slide)
    jpegs = [tiles[i] for i in np.random.default_rng(0).permutation(len(tiles))]
    with tifffile.TiffFile(slide) as tif:
        page = tif.pages.first
        tile = (page.tilelength, page.tilewidth, 3)
    codec, size = ZstdCodec(), levels["zarr"].layout.chunk
    chunks = {name: compressed_chunks(level, side) for name, level in levels.items()}
    # Into memory that is there already: new memory for each tile costs up to half of decoding it. JPEGs besides into
    # memory that is not aligned to a vector, which is the fastest that libjpeg-turbo can do; called without `out`, as
    # most do it, it writes past the cache.
    kept = threading.local()

    def buffer(*shape: int) -> np.ndarray:
        if not hasattr(kept, "buffer"):
            kept.buffer = np.empty(3 * size * size, np.uint8)
        return kept.buffer[: math.prod(shape)].reshape(shape)

    return [
        (
            "JPEG alone",
            many(jpegs, lambda j: imagecodecs.jpeg8_decode(j, out=tile_room(tile)).nbytes),
        ),
        (
            "JPEG alone, new memory",
            many(jpegs, lambda j: imagecodecs.jpeg8_decode(j).nbytes),
        ),
        ("zstd alone", many(chunks["zarr"], lambda c: codec.decode(c, buffer(3, size, size)).nbytes)),
    ]


def readers(slide: Path, stores: dict[str, Path], levels: dict[str, StoredLevel]) -> dict[str, Read]:
    """Every way to read a tile."""
    fast, openslide = Slide.open(slide, "tiff"), Slide.open(slide, "openslide")
    sources = {name: Image(Slide.open(path), cache=0, threads=1) for name, path in {"TIFF": slide, **stores}.items()}

    def through(name: str) -> Read:
        return lambda y, x, size: sources[name].read(Box((y, x), (y + size, x + size)))

    def straight(name: str) -> Read:
        return lambda y, x, size: levels[name].read(y, x, size, size)

    import zarr

    array: Any = zarr.open_array(stores["zarr"] / "0", mode="r")
    found: dict[str, Read] = {
        "TIFF, OpenSlide": lambda y, x, size: openslide.read(0, y, x, size, size),
        "TIFF, tifffile": lambda y, x, size: fast.read(0, y, x, size, size),
        "TIFF, Image": through("TIFF"),
        "zarr, zarr-python": lambda y, x, size: array[:, y : y + size, x : x + size],
    }
    for name in stores:
        found |= {f"{name}, ours": straight(name), f"{name}, Image": through(name)}
    try:
        import tensorstore
    except ImportError:
        return found
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{stores['zarr']}/0/"}}
    opened = tensorstore.open(spec, read=True).result()
    found["zarr, tensorstore"] = lambda y, x, size: opened[:, y : y + size, x : x + size].read().result()
    return found


def measure_reading(slide: Path, stores: dict[str, Path], side: int) -> list[Rate]:
    """Rates of all readers at several tile sizes, with one and two threads."""
    levels = {
        name: StoredLevel(stores[name] / "0", (side, side), settings.layout, ZstdCodec(settings.compression))
        for name, settings in CODECS.items()
    }
    ways: dict[tuple[str, int], Jobs] = {(what, 0): jobs for what, jobs in decoders(slide, levels, side)}
    for what, read in readers(slide, stores, levels).items():
        for size in (256, 512, 1024, 2048):
            ways[what, size] = [partial(_read, read, y, x, size) for y, x in tiles(side, size)]
    return [rate for threads in (1, 2) for rate in in_turns(ways, threads, "reading")]


def _read(read: Read, y: int, x: int, size: int) -> int:
    read(y, x, size)
    return 3 * size * size


def alone(slide: Path, store: Path) -> Jobs:
    """The least work of any converter: decoding every tile of the slide's finest level once, and encoding every
    chunk of every level that is written, with its checksum.

    Both from memory to memory that is there already. Not among it: reading and writing files, taking pixels apart
    into planes, halving them for the pyramid, hashes, the thumbnail, and waiting for the disk.
    """
    jpegs, kept, codec = compressed_tiles(slide), threading.local(), ZstdCodec()

    def decode(data: bytes) -> int:
        if not hasattr(kept, "shape"):
            kept.shape = imagecodecs.jpeg8_decode(data).shape
        return int(imagecodecs.jpeg8_decode(data, out=tile_room(kept.shape)).nbytes)

    def encode(chunk: np.ndarray) -> int:
        codec.encode(chunk)
        return 0  # the pixels were counted when they were decoded

    chunks = [chunk for level in stored_levels(store) for chunk in all_chunks(level)]
    return [*many(jpegs, decode), *(partial(encode, chunk) for chunk in chunks)]


def stored_levels(store: Path) -> list[StoredLevel]:
    """All levels of a store."""
    paths = sorted(path for path in store.iterdir() if path.name.isdigit())
    shapes = [json.loads((path / "zarr.json").read_bytes())["shape"][1:] for path in paths]
    return [StoredLevel(path, tuple(shape), Settings().layout) for path, shape in zip(paths, shapes)]


def all_chunks(level: StoredLevel) -> list[np.ndarray]:
    """The pixels of all chunks that are not absent."""
    size = level.layout.chunk
    cells = [cell for cell in level.chunks(0, 0, *level.shape) if not level.is_absent(*cell)]
    corners = [(row * size, column * size) for row, column in cells]
    return [level.read(y, x, min(size, level.shape[0] - y), min(size, level.shape[1] - x)) for y, x in corners]


def measure_converting(slide: Path, store: Path, work: Path, side: int) -> list[Rate]:
    """Conversion and its floor."""

    def run(threads: int) -> int:
        out = work / f"run{threads}"
        shutil.rmtree(out, ignore_errors=True)
        convert(Job(slide, "slide"), out, Settings(tissue="none"), threads=threads)
        return side * side * 3

    floor, rates = alone(slide, store), []
    for threads in (1, 2):
        ways: dict[tuple[str, int], Jobs] = {(CONVERTING[0], 512): floor, (CONVERTING[1], 512): [partial(run, threads)]}
        rates += in_turns(ways, threads, "converting")
    return rates


def kept_rates(converting: bool) -> list[Rate]:
    """The part of the record that is not measured anew."""
    rates = [Rate(**rate) for rate in json.loads(RESULT.read_text())["rates"]]
    return [rate for rate in rates if (rate.what in CONVERTING) == converting]


def measured(what: str) -> tuple[str, ...]:
    """The parts of the record that are measured anew."""
    return ("reading", "converting") if what == "all" else (what,)


def kept_load() -> dict[str, float]:
    """The load of the machine with which the parts of the record were measured."""
    return dict(json.loads(RESULT.read_text()).get("load", {})) if RESULT.exists() else {}


def main() -> None:
    """Measures, prints a table, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where slides and stores are made, and kept; else they are removed")
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--what", choices=("all", "reading", "converting"), default="all", help="what is measured anew")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options.work or Path(folder), options.side, options.what)


def run(work: Path, side: int, what: str) -> None:
    """Measures what is asked for with slides and stores in a folder."""
    work.mkdir(parents=True, exist_ok=True)
    slide = work / f"slide{side}.tif"
    if not slide.exists():
        write_slide(slide, SlideSpec(side, side, tissue=0.6, noise=True), threads=2)
    stores = {name: work / f"{name.replace(' ', '-')}.zarr" for name in CODECS}
    for name, settings in CODECS.items():
        convert(Job(slide, stores[name].stem), work, settings, threads=2)
    store = stores["zarr"]
    reading = measure_reading(slide, stores, side) if what != "converting" else kept_rates(converting=False)
    converting = measure_converting(slide, store, work, side) if what != "reading" else kept_rates(converting=True)
    rates = reading + converting
    table = Table("what", "tile", "threads", "MB / CPU s", "MB / s", "of the floor")
    for rate in rates:
        figures = f"{rate.per_cpu:.0f}", f"{rate.per_wall:.0f}", f"{rate.of_floor:.2f}"
        table.add_row(rate.what, str(rate.tile or ""), str(rate.threads), *figures)
    Console().print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "environment": environment(),
        "side": side,
        "rounds": ROUNDS,
        # How many processes wanted the processors at the end: with more than there are, wall times mean little.
        "load": {**kept_load(), **{part: round(os.getloadavg()[0], 1) for part in measured(what)}},
        "rates": [asdict(rate) for rate in rates],
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
