"""Writes docs/peers.md and its pictures from benchmarks/results/peers.json: `python -m benchmarks.peers.page`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.calibrated import RATES
from benchmarks.exactness_page import table
from benchmarks.keep import FIGURES
from benchmarks.peers.ways import PLAIN, WAYS
from benchmarks.peers.works import FULL, Work
from lightning_plugin.units import format_bytes
from tests.conftest import RESULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "peers.md"
#: Gradients further from plain PyTorch's than this, in their norm, are wrong, not rounded.
WRONG = 1e-3
MIB = 2**20

INTRODUCTION = """# Beside other ways

<!-- Written by `python -m benchmarks.peers.page`; edit benchmarks/peers/page.py instead. -->

The same step (forward, mean of squares, backward; batch 1, float32, one thread) by published and common ways to train
on large images, and by ours. Each run is a process of its own, the ways take turns, and a step that does not count goes
before the one that is timed. `python -m benchmarks.peers` makes the small sizes again, `--set full` those of
the aims, which take hours; either goes on where it was stopped.

- **Time** is the processor's: other work on the machine counts little in it. Beside it stands the clock's. **Of
  plain's** is the median over repetitions of the ratio to plain PyTorch in the same repetition, with the least and the
  most.
- **Memory** is what the process took beyond what it held when networks, images and libraries were there: in the timed
  step, and in all, with setting up (lightstream's statistics of a whole tile, our planning, a compiler).
- **Gradients apart** is the norm of the difference to plain PyTorch's over the norm of theirs, and the same for the
  worst parameter. Above 10⁻³ they are wrong, however fast they came.
- BatchNorms use running statistics and are not trained: lightstream can do no other. Images have sides and tiles that
  strides divide, for the same reason.
- *Ours, in the rival's memory* has the budget under which its process promises to take, planning and all, no more than
  the rival (lightstream; for bags gradient caching) takes in its timed step: (that − 64 MiB) / 1.15. Where it says
  *calibrated*, plans go by this processor's own rates, measured before; else by the built-in ones of an older one.
- On a CPU everything is the processor's memory, so `save_on_cpu` moves nothing; its row shows that it does no harm.
  Large parameters, where the peer is DeepSpeed, are on [the page on speed](speed.md).
"""


def write_page() -> Path:
    """The page, and a picture for each work."""
    path = RESULTS / "peers.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    parts = [INTRODUCTION, *(section(name, case) for name, case in ordered(cases)), missing(cases)]
    PAGE.write_text("\n".join(p for p in parts if p))
    return PAGE


def ordered(cases: dict[str, Any]) -> list[tuple[str, Any]]:
    """The works of the aims first."""
    full = [work.name for work in FULL]
    rank = {name: i for i, name in enumerate([*full, *(n for n in cases if n not in full)])}
    return sorted(cases.items(), key=lambda item: rank[item[0]])


def missing(cases: dict[str, Any]) -> str:
    names = [f"`{work.name}`" for work in FULL if work.name not in cases]
    return f"Not measured yet of the full set: {', '.join(names)}.\n" if names else ""


def section(name: str, case: dict[str, Any]) -> str:
    runs, work = case["runs"], case["work"]
    rows = [row(way, runs.get(way, []), runs.get(PLAIN, []), case["kind"]) for way in WAYS]
    head = ["way", "processor", "of plain's", "clock", "memory, step", "memory, all", "gradients apart", "runs"]
    figure = f"peers-{name.replace(' ', '-').replace('%', '')}.png"
    draw(runs, name, FIGURES / figure)
    machine = case["where"]
    text = f"## {heading(work)}\n\n{table(head, rows)}\n{against_rival(work, runs)}"
    return (
        f"{text}torch {machine['torch']}, {machine['processors']} processors, {machine['processor']}.\n\n"
        f"![Processor time of a step against memory, for each way.](figures/{figure})\n"
    )


def heading(work: dict[str, Any]) -> str:
    shown = Work(**work)
    network = shown.network if shown.width == 1 else f"{shown.network}, width × {shown.width:g}"
    image = f"{shown.side:,}²" if not shown.patches else f"{shown.patches} patches of {shown.side}²"
    extra = [f"{shown.glass:.0%} glass"] if shown.glass else []
    extra += [f"lightstream's tile {shown.tile:,}"] if shown.tile else []
    return ", ".join([network, image, *extra])


def row(way: str, runs: list[dict[str, Any]], plain: list[dict[str, Any]], kind: str) -> list[str]:
    label, reason = WAYS[way].label, WAYS[way].reason(kind)
    if WAYS[way].module == "ours" and any(r.get("rates") == RATES for r in runs):
        label += f", {RATES}"
    failed = next((r["failed"] for r in runs if "failed" in r), None)
    if reason or failed or not runs:
        why = f"cannot: {reason}" if reason else f"failed: {failed.replace('|', '/')}" if failed else "not run"
        return [label, why, "–", "–", "–", "–", "–", "–"]
    error, worst = (max(r[n] for r in runs) for n in ("error", "worst_error"))
    apart = f"{error:.0e}, worst {worst:.0e}"
    return [
        label,
        f"{middle(runs, 'processor_seconds'):.1f} s",
        spread(ratios(runs, plain)),
        f"{middle(runs, 'seconds'):.1f} s",
        format_bytes(middle(runs, "step_peak")),
        format_bytes(middle(runs, "peak")),
        f"**wrong**: {apart}" if error > WRONG else apart,
        str(len(runs)),
    ]


def middle(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(r[name] for r in runs)


def ratios(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[float]:
    """Processor times over those of another way, in the same repetitions."""
    pairs = zip(runs, others, strict=False)  # one of the two may have been stopped before the other
    return [a["processor_seconds"] / b["processor_seconds"] for a, b in pairs if "failed" not in b]


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    return f"**{statistics.median(values):.2f}** ({min(values):.2f} to {max(values):.2f})"


def against_rival(work: dict[str, Any], runs: dict[str, Any]) -> str:
    """How many times faster ours is than the rival, and whether in no more memory."""
    rival, ours = runs.get(work["rival"], []), runs.get("ours", [])
    if not rival or not ours or any("failed" in r for r in (*rival, *ours)):
        return ""
    faster = ratios(rival, ours)
    most, least = max(r["peak"] for r in ours), min(r["step_peak"] for r in rival)
    words = "no more" if most <= least else "MORE"
    aim = f"; the aim is {work['aim']:g}" if work["aim"] else ""
    verdict = ", and the rival's gradients are wrong" if max(r["error"] for r in rival) > WRONG else ""
    return (
        f"Ours is {spread(faster)} times as fast as {WAYS[work['rival']].label}{aim}, with {words} memory: "
        f"{format_bytes(most)} at most, in all, against {format_bytes(least)} at least, in its step{verdict}. "
    )


#: A mark for each way.
MARKERS = dict(zip(WAYS, "oPX^Dvs*", strict=True))


def draw(runs: dict[str, Any], name: str, path: Path) -> None:
    """Time against memory: the nearer to the corner the better; hollow, if gradients are wrong."""
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for way, made in runs.items():
        if not made or any("failed" in r for r in made):
            continue
        x, y = middle(made, "step_peak") / MIB, middle(made, "processor_seconds")
        colour = "#2a7f62" if way.startswith("ours") else "#8a94a6"
        wrong = max(r["error"] for r in made) > WRONG
        label = WAYS[way].label.replace("`", "")
        axis.scatter(
            x,
            y,
            s=60,
            marker=MARKERS[way],
            edgecolors=colour,
            facecolors="none" if wrong else colour,
            alpha=0.8,
            label=label,
        )
    axis.set(xlabel="memory of the process in a step, MiB", ylabel="processor seconds of a step")
    axis.set_title(name, loc="left")
    axis.set_xlim(left=0, right=axis.get_xlim()[1] * 1.05)
    axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.1)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)  # ways lie too near for words beside them
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    print(write_page())
