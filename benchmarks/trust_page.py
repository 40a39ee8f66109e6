"""Writes docs/trust.md and its pictures from the measured files: `python -m benchmarks.trust_page`.

What was not run is said to be not run. `benchmarks/defects.json` lists defects that no run's file lists itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.exactness_page import RESULTS, ROOT, result, table
from benchmarks.trust_picture import draw_slides, draw_steps

PAGE = ROOT / "docs" / "trust.md"
FIGURES = ROOT / "docs" / "figures"
LISTED = ROOT / "benchmarks" / "defects.json"

INTRODUCTION = """# Faults, load and hostile files

<!-- Written by `python -m benchmarks.trust_page`; edit benchmarks/trust_page.py instead. -->

What happens when a disk is full, a worker dies, a file lies, ten thousand slides come or a run lasts for weeks. Every
number is counted by a run that took place; its file in `benchmarks/results/` holds all of it.
What is defended, and what is not, is in the repository's `SECURITY.md`.
"""

NOT_RUN = "*Not run.*\n"

#: What each state machine is about, by its file.
MACHINES = {
    "state_machine_cohort": "stores and tables of a cohort: preprocess, verify",
    "state_machine_embed": "embed",
    "state_machine_fit": "fit and resume",
    "state_machine_recipes": "the cache of recipes",
    "state_machine_tiers": "the tiers of memory",
}
COUNTED = ("sequences", "steps", "kills", "damages", "concurrent", "disagreements")


def write_page() -> Path:
    """Write the page, from whatever has been run."""
    parts = [INTRODUCTION]
    for title, about, write, name in SECTIONS:
        found = result(name) if name else True
        parts.append(f"## {title}\n\n{about}\n\n" + (NOT_RUN if found is None else write(found)))
    PAGE.write_text("\n".join(parts))
    return PAGE


def cell(value: Any) -> str:
    """A value as it stands in a table; a text may hold what ends a cell."""
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")


def lines(head: list[str], rows: list[list[Any]]) -> str:
    return table(head, [[cell(value) for value in row] for row in rows])


def faults(data: Any) -> str:
    values = data["values"]
    columns = ["command", "kind", "calls", "sites", "sites tried", "injected", "right", "recovered", "defects"]
    rows = [[row.get(column, "–") for column in columns] for row in values["rows"]]
    sums: list[Any] = ["**all**", "", *(sum(row.get(column, 0) for row in values["rows"]) for column in columns[2:])]
    notes = "".join(f"\n- {note}" for note in values.get("notes", []))
    reached = [[row["command"], row["sites"], row["reached"]] for row in values.get("reached", [])]
    by_command = lines(["command", "sites", "hit by some kind"], reached)
    return f"{by_command}\n\n{lines(columns, [*rows, sums])}" + (notes + "\n" if notes else "")


def machines(_: Any) -> str:
    rows = []
    for name, about in MACHINES.items():
        data = result(name)
        values = {} if data is None else dict(data["values"])
        values.setdefault("sequences", "not run")
        rows.append([about, *(values.get(column, "–") for column in COUNTED)])
    return lines(["commands", *COUNTED], rows)


def kills(_: Any) -> str:
    """Runs that were killed at random moments, of benchmarks that are older than the state machines."""
    rows: list[list[Any]] = []

    def add(name: str, what: str, count: Callable[[Any], tuple[Any, Any, str]]) -> None:
        data = result(name)
        rows.append([what, *(("–", "–", "not run") if data is None else count(data["values"]))])

    add(
        "kill_and_rerun", "preprocess, killed, given again",
        lambda v: (v["kills"], v["identical"], f"{v['unfinished_when_killed']} were at work when killed"),
    )  # fmt: skip
    add(
        "sigterm", "preprocess, SIGTERM",
        lambda v: (v["tries"], v["ended_within_5_s"], f"ended, the last after {v['seconds_at_most']} s"),
    )  # fmt: skip
    add(
        "fit_kill_resume", "fit, killed, resumed",
        lambda v: (v["kills"], sum(v[k]["identical"] for k in ("plain", "tiled")), "weights equal to the bit"),
    )  # fmt: skip
    add(
        "streamed_kills", "fit with streamed parameters, killed until it ends",
        lambda v: (v["kills"], f"{v['identical']} of {v['runs']} runs", "weights equal to the bit"),
    )  # fmt: skip
    add(
        "verify_damage", "stores damaged (cut, deleted, bits flipped), verified",
        lambda v: (sum(v["tried"].values()), sum(v["found"].values()), "damages found"),
    )  # fmt: skip
    return lines(["what", "n", "right", ""], rows)


def fuzzed(data: Any) -> str:
    values = data["values"]
    kinds = ["inputs", "refused", "same", "agreed", "unjudged"]
    faults = ["wrong_successes", "unclear_errors", "crashes", "hangs"]
    rows = [[name, *(counts.get(kind, 0) for kind in kinds)] for name, counts in sorted(values["formats"].items())]
    sums: list[Any] = ["**all**"]
    sums += [sum(counts.get(kind, 0) for counts in values["formats"].values()) for kind in kinds]
    told = ", ".join(f"{kind.replace('_', ' ')} **{values[kind]}**" for kind in faults)
    return f"Of {values['inputs']:,} inputs: {told}.\n\n" + lines(["format", *kinds], [*rows, sums])


def load(data: Any) -> str:
    cases = data["cases"]
    rows: list[list[Any]] = []
    for what in ("preprocess", "preprocess, nothing to do", "verify", "fit's data", "view"):
        for name in ("part", "all"):
            case = cases.get(f"{what}, {name}")
            if case is None:
                rows.append([what, "not run", *["–"] * 3])
                continue
            count = case["slides"]
            seconds, used = case.get("seconds"), case.get("processor seconds")
            clock = case.get("ms for each by the clock") if seconds is None else 1000 * seconds / count
            each = case.get("ms for each") if used is None else 1000 * used / count
            if what == "view":
                clock, each = each, None
            peak = case.get("peak MiB", case.get("MiB"))
            rows.append([what, count, "–" if each is None else each, "–" if clock is None else clock, peak])
    told = lines(["", "slides", "ms each, of processors", "ms each, by the clock", "MiB at most"], rows)
    reads = cases.get("fit's data, all")
    if reads is not None and "last tenth, in first tenths" in reads:
        told += (
            f"\nAn epoch of fit's data path opened, augmented and read {reads['read']:,} slides: the last tenth took "
            f"{reads['last tenth, in first tenths']:.2f} times the first one's processor time, and the process grew by "
            f"{reads['growth from the first tenth, MiB']:.0f} MiB from the first tenth on. For `view`, milliseconds "
            "are those from the request of a slide and its first tile to their answers. To read a manifest of "
            f"{reads['slides']:,} slides and divide them took {reads['seconds until ready']:.1f} s.\n"
        )
    if "over slides" in cases.get("preprocess, all", {}):
        draw_slides(cases, FIGURES / "load-slides.png")
        told += "\n![Milliseconds a slide as their number grows.](figures/load-slides.png)\n\n"
        told += "The first point of each line has the start of the command in it.\n"
    return told


def soak(data: Any) -> str:
    case = data["cases"].get("steps")
    if case is None:
        return NOT_RUN
    early, late = case["after a tenth"], case["at the end"]
    names = {
        "resident": "memory of the process, MiB", "ledger": "held on the device, KiB",
        "disk": "held on the disk, bytes", "files": "open files", "threads": "threads",
        "left": "files in the folder of tiers",
    }  # fmt: skip
    scale = {"resident": 2**20, "ledger": 2**10}
    rows: list[list[Any]] = [
        [about, *(round(at[key] / scale[key]) if key in scale else at[key] for at in (early, late))]
        for key, about in names.items()
    ]
    rows.append(["ms of a step, of processors", *(case[f"ms of a step, {when} tenth"] for when in ("second", "last"))])
    asked = case.get("steps asked for", case["steps"])
    cut = "" if asked == case["steps"] else f" (of {asked:,} that were asked for; the run was cut short)"
    told = (
        f"**{case['steps']:,} steps**{cut} of a network with convolutions and {case['streamed']} streamed tensors, "
        f"under a budget of {case['budget']}, with maps on {' and '.join(case['tiers'])}; the largest peak was "
        f"{case['largest peak, MiB']:.2f} MiB.\n\n" + lines(["", "after a tenth", "at the end"], rows)
    )
    if "over steps" in case:
        draw_steps(case, FIGURES / "load-steps.png")
        told += (
            f"\nThe process grew by {case['growth of the process, MiB']:.0f} MiB after the first tenth: what is "
            "remembered of sizes (tapes of tiles, operators on tensors without data, recipes) fills up to its bounds, "
            "since nearly every step of this training has a size that was not there before.\n"
            "\n![Memory and time of a step over all steps.](figures/load-steps.png)\n"
        )
    return told


def mutants(data: Any) -> str:
    values = data["values"]
    columns = ["mutants", "killed", "timeout", "survived", "excused"]
    rows = [[row["file"], *(row.get(column, 0) for column in columns)] for row in values["rows"]]
    sums = ["**all**", *(sum(row.get(column, 0) for row in values["rows"]) for column in columns)]
    again = values.get("asked again")
    by = f"By {values['tool']}{f'; {again}' if again else ''}.\n\n"
    told = by + lines(["file", *columns], [*rows, sums])
    for kind in ("excused", "survived"):
        told += "".join(f"\n- {kind}: {cell(phrase(one))}" for one in values.get(kind, []))
    return told + "\n"


def phrase(one: Any) -> str:
    """An entry of a list, whatever its fields."""
    return ", ".join(map(str, one.values())) if isinstance(one, dict) else str(one)


def audit(data: Any) -> str:
    values = data["values"]
    told = "".join(f"- {cell(one)}\n" for one in values["weaknesses"]) or "None has a weakness that it knows.\n"
    return (
        f"On {values['run']}: {values['pinned']} pinned packages, of which {values['source']} knows {values['known']}; "
        f"its data are of {values['data of']}. {values['limits']}\n\n{told}"
    )


def defects(_: Any) -> str:
    found = list(all_defects())
    if not found:
        return "None is listed.\n"
    return f"{len(found)}:\n\n" + lines(["found by", "what", "test"], found)


def all_defects() -> Iterator[list[str]]:
    """Of each defect: which run found it, what it was, and the test that holds it now."""
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        for one in data.get("values", {}).get("defects_found", []) if isinstance(data.get("values"), dict) else []:
            yield [path.stem.replace("_", " "), one["what"], tests_of(one["test"])]
    for one in json.loads(LISTED.read_text()):
        yield [one["found by"], one["what"], tests_of(one["test"])]


def tests_of(named: Any) -> str:
    names = [named] if isinstance(named, str) else named
    return ", ".join(f"`{name}`" for name in names)


Section = tuple[str, str, Callable[[Any], str], str]
SECTIONS: tuple[Section, ...] = (
    (
        "Faults, one at a time",
        "In a small run of each command the n-th call of a kind fails, once or from then on. Calls of one function "
        "about files of one sort are a *site*; of each row, the first call of each site comes first, then the last of "
        "each, then the others, as far as the time went: `injected` of `calls`. *Right*: the result was right all the "
        "same. *Recovered*: a clear message, and the same command again ended in the right result.",
        faults, "faults",
    ),
    (
        "Random sequences against a model",
        "Commands, kills, damages and runs at the same time, in random order; what is on the disk is compared with a "
        "model of what should be there.",
        machines, "",
    ),
    ("Kills and damages", "At random moments and places; each then run again.", kills, ""),
    (
        "Changed files",
        "Good files of every format, changed at random, each read in a process of its own: "
        "[how it is judged](how-to/fuzzing.md).",
        fuzzed, "fuzz",
    ),
    (
        "Ten thousand slides",
        "Small slides (320 px) through each command, on a tenth of them and on all, on a machine of two processors "
        "that had other work: milliseconds of processors say what the commands do, those of the clock also what they "
        "waited for.",
        load, "load",
    ),
    (
        "A long training",
        "Steps at random sizes, with recipes, maps on lower tiers and streamed parameters: `python -m benchmarks.load "
        "steps`.",
        soak, "load",
    ),
    ("Mutants", "Changes of the engine's rules and planner, and whether the tests notice.", mutants, "mutants"),
    (
        "Dependencies",
        "`make audit` asks pip-audit about every pinned version, and needs a network on which it can ask. Where this "
        "page was made, it could not: that check is **not run**. What was run is a comparison with the last advisories "
        "that are published as a package (`python -m benchmarks.old_advisories`).",
        audit, "audit",
    ),
    (
        "Defects found by this",
        "Each is mended, and has a test that fails without.",
        defects, "",
    ),
)  # fmt: skip

if __name__ == "__main__":
    print(write_page())
