"""`make mutants`: which small changes of the engine its tests notice; goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.mutation import excused
from tests.mutation.mutants import Mutant, digest, sampled
from tests.mutation.places import ENGINE, ROOT, STATE, changed_files
from tests.mutation.tests import Reach, Test
from tests.mutation.trial import attempt, preload

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=240.0, help="how long (default: 240)")
    parser.add_argument("--only", nargs="*", default=[], help=f"files of {ENGINE}, such as rules/window.py")
    parser.add_argument("--seed", type=int, default=0, help="another order of the mutants (default: 0)")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of tests that a mutant meets (default: 30)")
    parser.add_argument("--first", default="", help="tests whose names have this come first")
    parser.add_argument("--again", action="store_true", help="ask anew about those that survived, and no others")
    parser.add_argument("--reached", action="store_true", help="use what is known of which tests reach what")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args()
    files = [name for name in changed_files() if not options.only or name.partition("/")[2] in options.only]
    if len(files) < len(options.only):
        parser.error(f"one of {', '.join(options.only)} is none of the files that are changed")
    STATE.mkdir(exist_ok=True)
    if not options.reached:
        command = [sys.executable, "-m", "tests.mutation.reach", str(STATE / "reach.jsonl")]
        subprocess.run(command, cwd=ROOT, check=True)
    state = State(STATE / "state.json", options.seed)
    judge = Judge(Reach(STATE / "reach.jsonl"), options.limit, options.first, state.sound)
    began, length = time.monotonic(), options.minutes * 60
    preload()
    if not judge.works():
        sys.exit("the engine's tests do not pass as they are: nothing could be said of mutants")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        shown = progress.add_task("mutants", total=length)
        for mutant in sampled(files, options.seed, state.survived if options.again else state.unknown):
            if (spent := time.monotonic() - began) > length:
                break
            state.add(mutant, judge.outcome(mutant), time.monotonic() - began - spent)
            told = ", ".join(f"{n} {what}" for what, n in sorted(state.counts().items()))
            progress.update(shown, completed=spent, description=told)
    write(options.results, state)
    print(f"{sum(state.counts().values())} mutants; in {options.results}")
    return 0


class Judge:
    """Says what becomes of a mutant; a test that fails on the engine as it is says nothing."""

    def __init__(self, reach: Reach, limit: float, first: str, sound: dict[str, bool]) -> None:
        self.reach, self.limit, self.first, self.sound = reach, limit, first, sound

    def works(self) -> bool:
        quick = sorted({test for tests in self.reach.files.values() for test in tests}, key=lambda test: test.seconds)
        return attempt(None, quick[:5])[0] == "survived"

    def outcome(self, mutant: Mutant) -> dict[str, str]:
        if excused.why(mutant.file, mutant.before, mutant.after):
            return {"outcome": "survived", "by": "not asked"}
        tests = self.reach.tests(mutant.file, mutant.line)
        if self.first:
            tests.sort(key=lambda test: self.first not in test.name)
        if not tests:
            return {"outcome": "survived", "by": "no test reaches it"}
        while chosen := [test for test in tests if self.sound.get(test.name, True)]:
            outcome, by = "survived", ""
            for part in self.parts(mutant.file, chosen):
                outcome, by = attempt((mutant.file, mutant.source), part)
                if outcome != "survived":
                    break
            test = next((test for test in chosen if test.name == by), None)
            if outcome == "survived" or test is None:
                return {"outcome": outcome, "by": by}
            if test.name not in self.sound:
                self.sound[test.name] = attempt(None, [test])[0] == "survived"
            if self.sound[test.name]:
                return {"outcome": outcome, "by": by}
        return {"outcome": "survived", "by": "no test reaches it"}

    def parts(self, file: str, tests: list[Test]) -> list[list[Test]]:
        """A few first, as most mutants do not live long; then what there is time for, and all about the file."""
        first = self.within(file, tests, self.limit / 10)
        rest = [test for test in tests if test not in first]
        return [part for part in (first, self.within(file, rest, self.limit, True)) if part]

    @staticmethod
    def within(file: str, tests: list[Test], seconds: float, always: bool = False) -> list[Test]:
        found: list[Test] = []
        for test in tests:
            seconds -= test.seconds + 0.05
            if not found or seconds >= 0 or (always and test.about(file)):
                found.append(test)
        return found


class State:
    """What is known of mutants, kept on the disk; of a file that has changed since, nothing."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        kept = json.loads(path.read_text()) if path.is_file() else {}
        self.sound: dict[str, bool] = kept.get("sound", {})
        self.seconds: float = kept.get("seconds", 0.0)
        digests = {digest(name) for name in changed_files()}
        found = kept.get("outcomes", {})
        self.outcomes: dict[str, dict[str, Any]] = {n: o for n, o in found.items() if n.split()[1] in digests}

    def add(self, mutant: Mutant, outcome: dict[str, str], seconds: float) -> None:
        about = {"file": mutant.file, "line": mutant.line, "before": mutant.before, "after": mutant.after}
        self.outcomes[mutant.name] = {**about, **outcome, "seconds": round(seconds, 1)}
        self.seconds += seconds
        part = self.path.with_suffix(".part")
        record = {"seed": self.seed, "seconds": self.seconds, "sound": self.sound, "outcomes": self.outcomes}
        part.write_text(json.dumps(record, indent=1))
        part.replace(self.path)

    def counts(self) -> Counter[str]:
        return Counter(found["outcome"] for found in self.outcomes.values())

    def unknown(self, name: str) -> bool:
        return name not in self.outcomes

    def survived(self, name: str) -> bool:
        return not self.unknown(name) and self.outcomes[name]["outcome"] == "survived"


def write(path: Path, state: State) -> None:
    """The counts, as the page on trust shows them."""
    from importlib.metadata import version

    from tests.conftest import environment

    rows: dict[str, Counter[str]] = {}
    listed: dict[str, list[dict[str, Any]]] = {"excused": [], "survived": []}
    for found in sorted(state.outcomes.values(), key=lambda found: (found["file"], found["line"], found["after"])):
        why = excused.why(found["file"], found["before"], found["after"]) if found["outcome"] == "survived" else None
        outcome = "excused" if why else found["outcome"]
        rows.setdefault(found["file"], Counter())[outcome] += 1
        if outcome in listed:
            mutation = f"{found['before']}  →  {found['after']}"
            entry = {"file": found["file"], "line": found["line"], "mutation": mutation}
            listed[outcome].append({**entry, "why": why} if why else entry)
    kinds = ("killed", "timeout", "survived", "excused")
    values = {
        "tool": f"Cosmic Ray {version('cosmic-ray')}",
        "rows": [
            {"file": file, "mutants": its.total(), **{kind: its[kind] for kind in kinds}} for file, its in rows.items()
        ],
        **listed,
        "seed": state.seed,
        "seconds": round(state.seconds),
    }
    record = {"name": "mutants", "environment": environment(), "values": values}
    path.write_text(json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
