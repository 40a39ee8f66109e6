"""Many slides, and many steps: `python -m benchmarks.load slides [--slides 10000]`, `python -m benchmarks.load steps`.

``slides``: small slides go through preprocess, verify, the data path of fit, and view. Time per slide should stay what
it is and memory should not grow, so each command runs on a tenth of the slides, too, and a time that grows with the
number of slides, or memory that does, shows in the ratios. Memory is the largest sum over a command's processes, looked
at twice a second. Milliseconds are those of processors, and beside them those of the clock, which count what the disk
takes and whatever else the machine does.

``steps``: a training of 5,000 steps at random sizes, with recipes, maps on the disk and streamed parameters. What the
process holds is compared between the end of the first tenth and the end: memory, on the device as the ledger counts it,
of the process, and on the disk; open files, threads, and files that were left.

Both write benchmarks/results/load.json, case by case.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tifffile
from rich.progress import track

from benchmarks.keep import keep_case
from benchmarks.soak import MIB, steps
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.store.staging import STAGING

#: Pixels along a side of a slide, and of its piece of tissue.
SIDE, TISSUE = 320, 160
#: Of so many slides the first part, against which all are compared.
PART = 10


@dataclass
class Watched:
    """What a command took, of the clock and of processors, and moment by moment the time, the seconds of processors
    and the memory of its processes."""

    seconds: float = 0.0
    processor: float = 0.0
    output: str = ""
    moments: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max((held for _, _, held in self.moments), default=0)

    def of(self, slides: int) -> dict[str, Any]:
        """What is kept of a command on so many slides."""
        return {
            "slides": slides,
            "seconds": self.seconds,
            "processor seconds": self.processor,
            "peak MiB": self.peak / MIB,
        }

    def tenths(self, out: Path) -> list[dict[str, float]]:
        """Milliseconds a slide, tenth by tenth, by when their stores were there."""
        ends = sorted(path.stat().st_mtime for path in out.glob("*.zarr/manifest.json"))
        when, used, _ = zip(*self.moments, strict=True)
        found, last, size = [], (when[0], used[0]), len(ends) / PART
        for tenth in range(1, PART + 1):
            end = ends[round(tenth * size) - 1]
            now = end, float(np.interp(end, when, used))
            clock, processor = (1000 * (b - a) / size for a, b in zip(last, now, strict=True))
            found.append({"slides": round(tenth * size), "ms": processor, "ms by the clock": clock})
            last = now
        return found


def memory_of(process: psutil.Process) -> int:
    """What a process and those that it began hold together."""
    return use_of(process)[1]


def use_of(process: psutil.Process) -> tuple[float, int]:
    """Seconds of processors that a process and those that it began have used, and what they hold together; one that has
    ended meanwhile holds nothing."""
    used, found = 0.0, 0
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0, 0
    for one in family:
        try:
            found += one.memory_info().rss
            used += sum(one.cpu_times())
        except psutil.NoSuchProcess:
            continue
    return used, found


def watch(command: Sequence[str]) -> Watched:
    """Run a command to its end; one that fails says why."""
    found, begin, before = Watched(), time.monotonic(), spent()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"})
        while process.poll() is None:
            found.moments.append((time.time(), *use_of(psutil.Process(process.pid))))
            time.sleep(0.5)
        found.seconds, found.processor = time.monotonic() - begin, spent() - before
        said.seek(0)
        found.output = said.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{found.output[-3000:]}")
    return found


def spent() -> float:
    """Seconds of processors of all processes that this one began and that have ended."""
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime


def wsi_train(*words: str) -> list[str]:
    return [sys.executable, "-m", "wsi_trainer", *words]


# Slides


def make_slides(folder: Path, count: int) -> None:
    """Small slides, no two alike: a piece of tissue on glass."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in track(range(count), "making slides"):
        path = folder / f"slide{i:06d}.tif"
        if path.exists():
            continue
        pixels = np.full((SIDE, SIDE, 3), 244, np.uint8)
        y, x = rng.integers(0, SIDE - TISSUE, 2)
        tissue = rng.normal((190, 110, 160), 18, (TISSUE, TISSUE, 3)).clip(0, 255)
        pixels[y : y + TISSUE, x : x + TISSUE] = tissue.astype(np.uint8)
        beside = path.with_suffix(".new")
        tifffile.imwrite(
            beside, pixels, tile=(SIDE // 2, SIDE // 2), compression="zlib", photometric="rgb",
            resolution=(20000, 20000), resolutionunit="CENTIMETER",
        )  # fmt: skip
        beside.rename(path)


def labelled(out: Path, count: int) -> Path:
    """A manifest of the first stores, with labels."""
    path = out.parent / f"labels{count}.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["slide", "label", "patient"])
        for i in range(count):
            table.writerow([str(out / f"slide{i:06d}.zarr"), "ab"[i % 2], f"p{i // 2}"])
    return path


def read_all(manifest: Path) -> dict[str, Any]:
    """An epoch of the data path of fit: every slide opened, augmented and read once, in the order of training."""
    begin = time.monotonic()
    data = SlideData(DataConfig(manifest=manifest, shift=16, stain=0.05, on_error="stop"), ["a", "b"])
    ready = time.monotonic() - begin
    seconds, used, held = [], [], []
    process, begin, began = psutil.Process(), time.monotonic(), time.process_time()
    for batch in data.train_dataloader():
        assert batch["image"].shape[-1] == SIDE
        seconds.append(time.monotonic() - begin)
        used.append(time.process_time() - began)
        held.append(process.memory_info().rss)
    tenth = max(1, len(seconds) // 10)
    return {
        "slides": len(data.records),
        "read": len(seconds),
        "seconds until ready": ready,
        "ms for each": 1000 * used[-1] / len(used),
        "ms for each by the clock": 1000 * seconds[-1] / len(seconds),
        "last tenth, in first tenths": (used[-1] - used[-1 - tenth]) / used[tenth - 1],
        "last tenth, in first tenths by the clock": (seconds[-1] - seconds[-1 - tenth]) / seconds[tenth - 1],
        "growth from the first tenth, MiB": (held[-1] - held[tenth]) / MIB,
    }


def look(what: Path, port: int) -> dict[str, Any]:
    """A viewer from its start: seconds until its page is there, for each of some answers, and its memory."""
    begin = time.monotonic()
    process = subprocess.Popen(wsi_train("view", str(what), "--port", str(port)), stdout=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/", process)
        ready = time.monotonic() - begin
        shown = len(json.loads(get(f"http://127.0.0.1:{port}/contents.json"))["slides"])
        seconds = []
        for i in random.Random(0).sample(range(shown), min(shown, 200)):
            begin = time.monotonic()
            get(f"http://127.0.0.1:{port}/slides/{i}/about.json")
            get(f"http://127.0.0.1:{port}/slides/{i}/tiles/0/0-0.jpg")
            seconds.append(time.monotonic() - begin)
        held = memory_of(psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()
    middle = sorted(seconds)[len(seconds) // 2]
    return {"slides": shown, "seconds until ready": ready, "ms for each": 1000 * middle, "MiB": held / MIB}


def get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return bytes(answer.read())


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the viewer has ended with {process.returncode}")
        try:
            get(address)
            return
        except OSError:
            time.sleep(0.1)


def slides(count: int, folder: Path, workers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each command on a tenth of the slides and on all of them."""
    made, out = folder / "slides", folder / "out"
    make_slides(made, count)
    part = max(1, count // PART)

    few = folder / "few"
    few.mkdir(exist_ok=True)
    for i in range(part):
        link = few / f"slide{i:06d}.tif"
        if not link.exists():
            os.link(made / link.name, link)
    for name, source, target in (("part", few, folder / "few-out"), ("all", made, out)):
        shutil.rmtree(target, ignore_errors=True)
        converted = watch(wsi_train("preprocess", str(source), str(target), "--workers", str(workers)))
        tenths = converted.tenths(target)
        again = watch(wsi_train("preprocess", str(source), str(target), "--workers", str(workers)))
        checked = watch(wsi_train("verify", str(target)))
        there = sum(p.suffix == ".zarr" for p in target.iterdir())
        assert there == (part if name == "part" else count), f"{there} stores: {converted.output[-500:]}"
        assert all(p.suffix == ".lock" for p in (target / STAGING).iterdir()), "something was left"
        size = part if name == "part" else count
        for what, one in (("preprocess", converted), ("preprocess, nothing to do", again), ("verify", checked)):
            yield f"{what}, {name}", one.of(size) | ({"over slides": tenths} if one is converted else {})
    for name, size in (("part", part), ("all", count)):
        manifest = labelled(out, size)
        command = [sys.executable, "-m", "benchmarks.load", "read", "--manifest", str(manifest)]
        read = watch(command)
        yield f"fit's data, {name}", {**json.loads(read.output.splitlines()[-1]), "peak MiB": read.peak / MIB}
    for name, stores, port in (("part", folder / "few-out", 8871), ("all", out, 8872)):
        yield f"view, {name}", look(stores, port)


@contextmanager
def folder_of(given: Path | None) -> Iterator[Path]:
    """The user's folder, which stays, or one that goes."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="load-") as found:
        yield Path(found)


def all_of(cases: Iterator[tuple[str, dict[str, Any]]]) -> None:
    for case, values in cases:
        told(case, values)


def told(case: str, values: dict[str, Any]) -> None:
    print(case, values, flush=True)
    keep_case("load", case, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["slides", "steps", "read"])
    parser.add_argument("--slides", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--minutes", type=float, help="ends steps after so many minutes, and says how many there were")
    parser.add_argument("--budget", default="8MiB")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where slides and stores are made, and stay")
    parser.add_argument("--manifest", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work: dict[str, Callable[[Path], None]] = {
        "slides": lambda at: all_of(slides(options.slides, at, options.workers)),
        "steps": lambda at: told("steps", steps(options.steps, options.budget, at, options.minutes)),
        "read": lambda at: print(json.dumps(read_all(options.manifest))),
    }
    with folder_of(options.folder) as at:
        work[options.what](at)


if __name__ == "__main__":
    main()
