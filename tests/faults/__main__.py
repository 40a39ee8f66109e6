"""`make faults`: faults for as long as is asked, with progress; goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.campaign import BEYOND, DEFECT, RECOVERED, RIGHT, Bench, kinds_of, order
from tests.faults.commands import COMMANDS
from tests.faults.engine import WORLDS, rows_of
from tests.faults.places import Place
from tests.faults.runs import ROOT, Server
from tests.faults.seam import Site

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
STATE = ROOT / ".faults"
FEWER = 12
"""One of so many rounds is for commands whose runs are long."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=240.0, help="how long (default: 240)")
    parser.add_argument("--commands", nargs="*", default=[], help="by default all: " + ", ".join(COMMANDS))
    every = dict.fromkeys(kind for name in COMMANDS for kind in kinds_of(name))
    parser.add_argument("--kinds", nargs="*", default=[], help="by default all: " + ", ".join(every))
    parser.add_argument("--n", type=int, nargs="*", default=[], help="only these, and show what was said")
    parser.add_argument("--anew", action="store_true", help="forget what was found")
    parser.add_argument("--engine", type=int, default=0, help="only steps of the engine: so many n of each kind")
    parser.add_argument("--again", action="store_true", help="only what was a defect")
    parser.add_argument("--state", type=Path, default=STATE, help="where outcomes are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args()
    options.state.mkdir(exist_ok=True)
    about = options.state / "state.json"
    state: dict[str, Any] = {"seconds": 0.0, "rows": {}}
    if about.is_file() and not options.anew:
        state = json.loads(about.read_text())
    names = options.commands or list(COMMANDS)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wsi-faults-") as folder, Server(Place(Path(folder))) as server:
        bench = Bench(server)
        if options.engine:
            for name in options.commands or WORLDS:
                state["engine"] = state.get("engine", {}) | {name: rows_of(server, name, options.engine)}
                about.write_text(json.dumps(state))
            names = []
        queues = dict(plan(bench, names, options, state))
        number = 0
        while queues and time.monotonic() - began < options.minutes * 60:
            for key in list(queues):
                if time.monotonic() - began >= options.minutes * 60:
                    break
                if COMMANDS[key[0]].short and number % FEWER:
                    continue
                found = next(queues[key], None)
                if found is None:
                    del queues[key]
                    continue
                one(bench, state["rows"]["|".join(key)], key, *found, bool(options.n))
            number += 1
            print(f"-- round {number}, {time.monotonic() - began:.0f} s, {len(queues)} kinds", flush=True)
            about.write_text(json.dumps(state))
    state["seconds"] += time.monotonic() - began
    about.write_text(json.dumps(state))
    if not options.n:
        write(options.results, state)
    tried = Counter(outcome["verdict"] for row in state["rows"].values() for outcome in row["tried"].values())
    print(dict(tried), f"in {state['seconds']:.0f} s; {options.results}")
    return 1 if tried[DEFECT] else 0


def plan(bench: Bench, names: list[str], options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """What is to be tried, by command and kind; calls are counted where that is not known."""
    for name in names:
        every = {site for kind in kinds_of(name).values() for site in bench.sites(name, kind)}
        state.setdefault("sites", {})[name] = len(every)
        for kind_name, kind in kinds_of(name).items():
            if options.kinds and kind_name not in options.kinds:
                continue
            key = f"{name}|{kind_name}"
            sites = bench.sites(name, kind)
            row = state["rows"].setdefault(key, {"tried": {}})
            row |= {"calls": len(sites), "sites": len(set(sites))}
            if not sites:
                continue
            numbers = [1] if kind.once else order(name, kind_name, sites)
            if options.again:
                numbers = [n for n in numbers if row["tried"].get(str(n), {}).get("verdict") == DEFECT]
            elif options.n:
                numbers = options.n
            else:
                numbers = [n for n in numbers if str(n) not in row["tried"]]
            yield (name, kind_name), iter([(n, sites[n - 1]) for n in numbers if n <= len(sites)])


def one(bench: Bench, row: dict[str, Any], key: tuple[str, str], n: int, site: Site, show: bool) -> None:
    outcome = bench.try_one(*key, n)
    row["tried"][str(n)] = {"verdict": outcome.verdict, "site": f"{site.call} {site.about}"}
    if outcome.verdict == DEFECT:
        row["tried"][str(n)] |= {"why": outcome.why, "struck": outcome.struck, "said": outcome.said}
    if show or outcome.verdict == DEFECT:
        said = outcome.said if show else outcome.said.strip()[-300:]
        print(f"## {key[0]} | {key[1]} | {n}: {outcome.verdict} {outcome.why} [{outcome.struck}]\n{said}", flush=True)


def write(path: Path, state: dict[str, Any]) -> None:
    """The counts, as the page on trust shows them."""
    from tests.conftest import environment

    rows = []
    for key, row in state["rows"].items():
        command, _, kind = key.partition("|")
        verdicts = Counter(outcome["verdict"] for outcome in row["tried"].values())
        injected = sum(verdicts.values()) - verdicts[BEYOND]
        if row["calls"]:
            rows.append({
                "command": command, "kind": kind, "calls": row["calls"], "sites": row["sites"],
                "sites tried": len({outcome["site"] for outcome in row["tried"].values()}), "injected": injected,
                "right": verdicts[RIGHT], "recovered": verdicts[RECOVERED], "defects": verdicts[DEFECT],
            })  # fmt: skip
    for row in (row for found in state.get("engine", {}).values() for row in found if row["calls"]):
        for why in row["why"]:
            print(f"## {row['command']} | {row['kind']} | {why}")
        rows.append({key: value for key, value in row.items() if key != "why"})
    reached: dict[str, set[str]] = {name: set() for name in state["sites"]}
    for key, row in state["rows"].items():
        reached[key.partition("|")[0]] |= {outcome["site"] for outcome in row["tried"].values()}
    by_command = [
        {"command": name, "sites": state["sites"][name], "reached": len(found)} for name, found in reached.items()
    ]
    values = json.loads(path.read_text())["values"] if path.is_file() else {}
    values = {"defects_found": [], "notes": []} | values
    values |= {"rows": rows, "reached": by_command, "seconds": round(state["seconds"], 1)}
    record = {"name": "faults", "environment": environment(), "values": values}
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
