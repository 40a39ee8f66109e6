"""Published and common ways to train on large images beside ours: time, the process's memory, and exactness.

    python -m benchmarks.peers                    # some minutes, small sizes
    python -m benchmarks.peers --set full         # hours: the sizes of the comparisons on docs/speed/other-ways.md
    python -m benchmarks.peers --list             # what is there, and what is left to do

Each run is a process of its own, on one thread: one step that counts for memory only, and one that is timed. The ways
take turns, so that what else the machine does meets all of them; times of the processor are kept beside the clock's.
What ran is kept in benchmarks/results/peers.json at once: a command that was stopped goes on where it was, and makes no
run twice. lightstream gets an environment of its own from the registry at its first run, in `.peers/`.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.calibrated import RATES, calibrated
from benchmarks.peers.runs import Run, expected_seconds, forget, good, keep_run, known, left, make
from benchmarks.peers.ways import WAYS
from benchmarks.peers.works import SETS, Work
from lightning_plugin.units import format_bytes, format_seconds


def listing(works: list[Work], ways: list[str], repetitions: int) -> Table:
    table = Table("work", "done", "left", "failed")
    for work in works:
        made = known(work)
        failed = [way for way in ways if len(good(made.get(way, []))) < len(made.get(way, []))]
        done = sum(len(good(made.get(way, []))) for way in ways)
        table.add_row(work.name, str(done), str(len(list(left([work], ways, repetitions)))), ", ".join(failed))
    return table


def time_left(todo: list[Run]) -> str:
    """Predicted time of runs, by others like them."""
    seconds = [expected_seconds(run) for run in todo]
    some = [s for s in seconds if s is not None]
    if not some:
        return "time left not known yet"
    more = sum(1 for s in seconds if s is None)
    return f"{format_seconds(sum(some))} left" + (f", and {more} runs of works that have not begun" if more else "")


def make_all(todo: list[Run], console: Console, minutes: float) -> None:
    """Make runs, in order, and keep each as soon as it is there."""
    gone: set[tuple[str, str]] = set()
    for place, run in enumerate(todo):
        if (run.work.name, run.way) in gone:
            continue
        rest = [r for r in todo[place:] if (r.work.name, r.way) not in gone]
        where = f"{len(todo) - len(rest) + 1} of {len(todo)}, {time_left(rest)}: {run.work.name}, {run.way}"
        if WAYS[run.way].of_rival and run.work.rival not in known(run.work):
            gone.add((run.work.name, run.way))
            console.print(f"{where}: left out, since its limit is what {run.work.rival} takes, which has not run")
            continue
        with console.status(where):
            began = time.perf_counter()
            found = make(run, console, minutes)
            keep_run(run, {**found, "rates": RATES, "process_seconds": time.perf_counter() - began})
        if "failed" in found:
            gone.add((run.work.name, run.way))
            console.print(f"{where}: cannot: {found['failed']}", markup=False)
        else:
            times = f"{found['seconds']:.1f} s ({found['processor_seconds']:.1f} s of the processor)"
            memory = format_bytes(found["step_peak"])
            console.print(f"{where}: {times}, {memory}, gradients apart {found['error']:.0e}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=SETS, default="quick", help="which works (default: quick)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="works whose names have one of these")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--repetitions", type=int, default=3, help="processes of each way (default: 3)")
    parser.add_argument("--minutes", type=float, default=60, help="after which a process is ended (default: 60)")
    parser.add_argument("--again", choices=("failed", "all"), help="make runs again that failed, or all of them")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    options = parser.parse_args()
    console = Console()
    works = [w for w in SETS[options.set] if any(text in w.name for text in options.only)]
    if not works:
        parser.error(f"no work of this set has {' or '.join(options.only)} in its name: see --list")
    if options.again:
        forget(works, options.ways, only_failed=options.again == "failed")
    console.print(listing(works, options.ways, options.repetitions))
    if options.list:
        return
    todo = list(left(works, options.ways, options.repetitions))
    if todo:
        torch.set_num_threads(1)  # rates are those of as many
        with calibrated():
            make_all(todo, console, options.minutes)


if __name__ == "__main__":
    main()
