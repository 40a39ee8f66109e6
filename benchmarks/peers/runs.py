"""Runs of ways on works: which are left, each in a process of its own, each kept when it ends.

A work's repetitions go through all ways in turn, so that what loads the machine for a while loads all of them. In each
the order is that of `WAYS`: a rival goes before ours, whose budget it sets.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.keep import keep_case, machine
from benchmarks.peers.environments import FOLDER, NotThere, last_line
from benchmarks.peers.networks import build
from benchmarks.peers.ways import PLAIN, WAYS, Way
from benchmarks.peers.works import Work
from lightning_plugin import make_plan
from tests.conftest import RESULTS

ROOT = Path(__file__).resolve().parents[2]
NAME = "peers"
#: What a process on a CPU may take beside its budget (docs/how-to/budget-contents.md).
SHARE, SLACK = 0.15, 64 * 2**20
SMALLEST = 2**20


class Refused(Exception):
    """A run that cannot be made, and why."""


@dataclass(frozen=True)
class Run:
    work: Work
    way: str
    repetition: int


def here() -> dict[str, Any]:
    """The machine and its PyTorch: runs of two are not compared."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    found = {name: value for name, value in machine().items() if name != "threads"}
    return {**found, "processor": models[0] if models else "unknown"}


def known(work: Work) -> dict[str, list[dict[str, Any]]]:
    """The runs of a work that were made here, by way."""
    path = RESULTS / f"{NAME}.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    case = cases.get(work.name, {})
    return case["runs"] if case.get("where") == here() else {}  # type: ignore[no-any-return]


def keep_runs(work: Work, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Replace the runs of a work; those of another machine are gone."""
    keep_case(NAME, work.name, {"work": asdict(work), "kind": work.kind, "where": here(), "runs": runs})


def good(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in runs if "failed" not in r]


def left(works: Sequence[Work], ways: Sequence[str], repetitions: int) -> Iterator[Run]:
    """The runs that are not there yet, in their order. A way that failed is not tried again."""
    for work in works:
        made = known(work)
        for repetition in range(repetitions):
            for way in ways:
                runs = made.get(way, [])
                failed = len(good(runs)) < len(runs)
                if not failed and len(runs) <= repetition and WAYS[way].reason(work.kind) is None:
                    yield Run(work, way, repetition)


def expected_seconds(run: Run) -> float | None:
    """Seconds of a run, by those of the same way, or of any way, on the same work."""
    made = known(run.work)
    same = [r["process_seconds"] for r in made.get(run.way, [])]
    every = [r["process_seconds"] for runs in made.values() for r in runs]
    return statistics.median(same or every) if every else None


def keep_run(run: Run, found: dict[str, Any]) -> None:
    made = known(run.work)
    made.setdefault(run.way, []).append(found)
    keep_runs(run.work, made)


def forget(works: Sequence[Work], ways: Sequence[str], only_failed: bool) -> None:
    """Drop runs, so that they are made again."""
    for work in works:
        made = known(work)
        kept = {w: good(runs) if only_failed else [] for w, runs in made.items() if w in ways}
        keep_runs(work, {w: runs for w, runs in (made | kept).items() if runs})


def budget_of(way: Way, work: Work) -> int:
    """The budget of ours; zero for other ways."""
    if way.share is not None:
        net = build(work.network, work.width, bool(work.patches))
        fixed = sum(2 * p.nbytes for p in net.parameters()) + sum(b.nbytes for b in net.buffers())
        shape = (work.patches or 1, 3, work.side, work.side)
        return int(fixed + way.share * make_plan(net, shape, budget="10TiB").plain_bytes)
    if not way.of_rival:
        return 0
    rival = known(work).get(work.rival, [])
    if not good(rival):
        raise Refused(f"{WAYS[work.rival].label} has not run, whose memory would be the limit")
    # The promise is for all that a process does, planning among it: the rival's step alone is the stricter limit.
    budget = int((good(rival)[0]["step_peak"] - SLACK) / (1 + SHARE))
    if budget < SMALLEST:
        raise Refused("the rival takes no more than what a process may take beside any budget")
    return budget


def reference(work: Work) -> Path:
    """The file of plain PyTorch's gradients."""
    folder = FOLDER / "references"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{work.name.replace(' ', '_').replace('%', '')}-{torch.__version__}.pt"


def start(way: Way, work: Work, gradients: Path, console: Console, minutes: float) -> dict[str, Any]:
    """The output of a process that goes one way."""
    budget = budget_of(way, work)
    try:
        python = sys.executable if way.environment is None else way.environment.python(console)
    except NotThere as error:
        raise Refused(str(error)) from error
    words = [python, "-m", "benchmarks.peers.alone", json.dumps(asdict(work)), way.module, way.function]
    words += ["--budget", str(budget), "--reference", str(gradients)]
    with tempfile.TemporaryDirectory() as compiled:  # nothing is left of a compiler from the run before
        quiet = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": compiled}
        environment = {**os.environ, **quiet, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            done = subprocess.run(
                words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60 * minutes
            )
        except subprocess.TimeoutExpired as error:
            raise Refused(f"had not ended after {minutes:g} minutes") from error
    answer = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not answer:
        said = last_line(done.stderr) if done.returncode > 0 else f"ended by signal {-done.returncode}"
        raise Refused(said)
    return json.loads(answer[-1])  # type: ignore[no-any-return]


def make(run: Run, console: Console, minutes: float) -> dict[str, Any]:
    """Make a run; a way that cannot go says why."""
    gradients = reference(run.work)
    if run.way != PLAIN and not gradients.exists():
        start(WAYS[PLAIN], run.work, gradients, console, minutes)  # they were cleaned away
    try:
        return start(WAYS[run.way], run.work, gradients, console, minutes)
    except Refused as error:
        return {"failed": str(error)}
