"""`make fuzz`: cases for as long as is asked, with progress; goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.fuzz.cases import FAULTS
from tests.fuzz.runner import ROOT, Runner, keep
from tests.fuzz.targets import TARGETS

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
STATE = ROOT / ".fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=240.0, help="how long (default: 240)")
    parser.add_argument("--only", nargs="*", default=[], help="formats; by default all: " + ", ".join(TARGETS))
    parser.add_argument("--anew", action="store_true", help="forget earlier cases, and begin with seed 0")
    parser.add_argument("--state", type=Path, default=STATE, help="where counts and found cases are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args()
    if unknown := set(options.only) - set(TARGETS):
        parser.error(f"there is no format {sorted(unknown)[0]!r}; there are {', '.join(TARGETS)}")
    names = options.only or list(TARGETS)
    options.state.mkdir(exist_ok=True)
    about = options.state / "state.json"
    state = json.loads(about.read_text()) if about.is_file() and not options.anew else {"next": 0, "seconds": 0.0}
    counts = {name: Counter(state.get("counts", {}).get(name, {})) for name in TARGETS}
    faults = list(state.get("faults", []))
    began, length = time.monotonic(), options.minutes * 60
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, Runner(Path(folder)) as runner, Progress(*columns) as progress:
        shown = progress.add_task("fuzzing", total=length)
        seed = state["next"]
        while (spent := time.monotonic() - began) < length:
            for name in names:
                outcome = runner.run(name, seed)
                if outcome["kind"] == "none":
                    continue
                counts[name][outcome["kind"]] += 1
                if outcome["kind"] in FAULTS:
                    faults.append({"target": name, "seed": seed, **outcome})
                    keep(TARGETS[name], seed, outcome, runner.changed(), options.state / "found")
            seed += 1
            cases = sum(map(Counter.total, counts.values()))
            progress.update(shown, completed=spent, description=f"{cases} cases, {len(faults)} faults")
            seconds = round(state["seconds"] + time.monotonic() - began)
            record = {"next": seed, "seconds": seconds, "counts": counts, "faults": faults}
            part = about.with_suffix(".part")
            part.write_text(json.dumps(record, indent=1))
            part.replace(about)
    write(options.results, counts, faults, seconds)
    for fault in faults[-20:]:
        print(json.dumps(fault)[:500])
    print(f"{cases} cases, {len(faults)} faults; counts in {options.results}, found cases in {options.state / 'found'}")
    return 1 if faults else 0


def write(path: Path, counts: dict[str, Counter[str]], faults: list[dict[str, object]], seconds: int) -> None:
    """The counts, as the page on trust shows them."""
    from tests.conftest import environment

    formats = {name: {"inputs": its.total(), **its} for name, its in counts.items() if its}
    total: Counter[str] = Counter()
    for its in counts.values():
        total.update(its)
    values = {
        "inputs": total.total(),
        "crashes": total["crash"],
        "hangs": total["hang"],
        "wrong_successes": total["wrong success"],
        "unclear_errors": total["unclear error"],
        "seconds": seconds,
        "formats": formats,
    }
    record = {"name": "fuzz", "environment": environment(), "values": values}
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
