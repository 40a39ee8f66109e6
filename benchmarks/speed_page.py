"""Writes docs/speed.md from the measured files: `python -m benchmarks.speed_page`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.deep_page import deep
from benchmarks.exactness_page import table
from benchmarks.streamed_page import offloading, streamed
from benchmarks.whole_slide_page import whole_slide
from lightning_plugin.units import format_bytes
from tests.conftest import RESULTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "speed.md"

INTRODUCTION = """# Speed and memory

<!-- Written by `python -m benchmarks.speed_page`; edit benchmarks/speed_page.py instead. -->

Every ratio is the median over pairs of steps that took turns in one run; every size is what a ledger counted. The files
in `benchmarks/results/` hold all of it, with versions, processors and threads.
"""


def against_plain(data: Any) -> str:
    rows = [
        [
            c["network"],
            f"{c['side']}²",
            c["share"],
            f"{c['plain_seconds']:.1f} s",
            f"**{c['ratio']:.2f}**",
            f"{c['aim']:.2f}" if c["aim"] == c["aim"] else "–",
            f"{100 * c['recompute_share']:.0f} %",
            planning(c),
            format_bytes(c["peak_bytes"]),
            ", ".join(c["tiers"]),
            f"{c['pairs']}, {c['machine']['threads']} thread(s)",
        ]
        for c in data["cases"].values()
    ]
    head = ["network", "image", "budget", "plain", "ratio", "aim"]
    head += ["forward recomputed", "planning", "peak", "tiers", "pairs"]
    return (
        "## Against plain PyTorch\n\nThe budget is what parameters and gradients take and a share of what plain "
        "PyTorch holds for backward. A ratio below one means that tiles stay in the processor's cache, and that less "
        "memory is asked of the system. Planning comes once, before the first of all steps: its seconds, of one "
        "thread, are beside the step's.\n\n" + table(head, rows)
    )


def planning(case: dict[str, Any]) -> str:
    """Seconds of planning, where they were measured."""
    return f"{case['plan_seconds']:.1f} s" if "plan_seconds" in case else "–"


def policies(data: Any) -> str:
    cases = data["cases"].values()
    timed = sorted({(c["side"], c["share"]) for c in cases if "share" in c})
    rows = []
    for name in sorted({c["policy"] for c in cases}):
        mine = [c for c in cases if c["policy"] == name]
        sides = [c for c in mine if "largest_side" in c]
        steps = {(c["side"], c["share"]): c for c in mine if "share" in c}
        rows.append(
            [
                f"`{name}`",
                *([largest_side(c) for c in sides] or ["–"]),
                *(cell for about in timed for cell in step_cells(steps.get(about, {}))),
            ]
        )
    head = ["policy", "largest image"]
    for side, share in timed:
        head += [f"step on {side}², {share:.2g}", "of plain's", "forward recomputed", "planning"]
    return (
        "## Against other ways to plan\n\nEach is a policy of the planner (`make_plan(..., policy=...)`). `overl` and "
        "`2ps` are LR-CNN's rows, with stored boundaries between them as `-h`; `checkpoint_sequential` is PyTorch's. "
        "`hmms` is HMMS's Algorithm 1 in this engine's words: everything stored goes to a lower tier, and is cut where "
        "that costs no waiting. "
        "`fused-stages`, everything fused on one grid, is nobody's: the simplest way to tile, for comparison. SFT, "
        "which fuses and tiles only maps that do not fit into memory, is not among them. The "
        "largest image is that of a training step of VGG-16's convolutional part under 1 GiB, planned; the times are "
        "those of steps with a budget of parameters, gradients and a share of plain PyTorch's activations: one that "
        "few of them can keep, and one that all can, planned by the same rates, calibrated before.\n\n"
        + table(head, rows)
    )


def largest_side(case: dict[str, Any]) -> str:
    side = case["largest_side"]
    return f"{side:,}²" + (" and more" if side >= case["limit"] else "")


def step_cells(case: dict[str, Any]) -> list[str]:
    """The time of a policy's step, or what it would need."""
    return [
        f"{case['seconds']:.1f} s" if "seconds" in case else needs(case),
        f"{case['ratio']:.2f}" if "ratio" in case else "–",
        f"{100 * case['recompute_share']:.0f} %" if "recompute_share" in case else "–",
        planning(case),
    ]


def needs(case: dict[str, Any]) -> str:
    """What a policy that cannot keep the budget would need."""
    return f"needs {format_bytes(case['needs_bytes'])}" if "needs_bytes" in case else "–"


def largest_image(data: Any) -> str:
    v = data["values"]
    times = v["predictions"]
    rows = [
        [n, f"{s:,}²" + (" and more" if s >= v["largest tried"] else ""), *step_and_plan(times.get(n))]
        for n, s in v["sides"].items()
    ]
    told = " ".join(
        f"One real step at {p['side']:,}² held {format_bytes(p['peak_bytes'])}, and its process "
        f"{format_bytes(p['process_bytes'])} beyond what it held before; it took {p['seconds'] / 60:.0f} min on "
        f"{p['threads']} thread(s), and {p['predicted_seconds'] / 60:.0f} min were predicted."
        for p in v["proofs"]
    )
    return (
        f"## The largest image under {format_bytes(v['limit'])}\n\nOne training step of VGG-16's convolutional part "
        "with global pooling, batch 1, float32. The others were run on tensors without data; ours beyond the steps "
        "told here is planned, and how long a step at that size would take is the plan's prediction, with the "
        f"planner's built-in rates for a processor. {told}\n\n"
        f"{table(['way', 'largest square image', 'a step there, predicted', 'planning it'], rows)}\n"
        "![Largest square image of each way on a logarithmic scale.](figures/largest-image.png)\n"
    )


def step_and_plan(times: dict[str, float] | None) -> list[str]:
    """The predicted hours of a step, and the seconds of planning it."""
    if times is None:
        return ["–", "–"]
    return [f"{times['step_seconds'] / 3600:,.0f} h", f"{times['plan_seconds']:.0f} s"]


def process_peak(data: Any) -> str:
    v = data["values"]
    plain = "over_baseline, default allocator"
    rows = [
        [
            r["network"],
            f"{r['side']:,}²",
            *(format_bytes(r[k]) for k in ("plain", "budget", "ledger", "disk", "over_baseline", plain)),
        ]
        for r in v["rows"]
    ]
    head = [
        "network",
        "image",
        "plain PyTorch",
        "budget",
        "ledger",
        "on the disk",
        "process",
        "process, `trim=False`",
    ]
    return (
        "## And by the process?\n\nThe peak of a process over what it held before planning and two steps, on one "
        "thread: as it is, holes given back, and with `trim=False` (docs/how-to/plan-a-budget.md). The "
        f"promise is the budget, {100 * v['share']:.0f} % and {format_bytes(v['slack'])}. Networks have the small "
        "widths of the tests.\n\n" + table(head, rows)
    )


def glass(data: Any) -> str:
    rows = []
    for name, c in sorted(data["cases"].items(), key=lambda pair: (pair[0].split()[0], pair[1]["side"])):
        for part, seconds in c.get("seconds", {}).items():
            faster, most = (c.get(key, {}).get(part) for key in ("times faster", "at most"))
            times = "–" if faster is None or most is None else f"**{faster:.2f}**"
            bound = "–" if most is None else f"{most:.1f}"
            where = [f"resnet18_{name.split()[0]}", f"{c['side']:,}²", c["budget"], part]
            told = [f"{seconds:.1f} s", f"{c['predicted'][part]:.1f} s", c.get("rates", "built in")]
            rows.append([*where, *told, times, bound, str(c["pairs"])])
    head = ["network", "image", "budget", "of it", "a step", "predicted", "rates", "faster than tissue", "at most",
            "rounds"]  # fmt: skip
    return (
        "## Glass\n\nA source that knows its glass; the tissue is one square in the middle. Processor seconds of steps "
        "on one thread that took turns. *At most* is what whoever shares could save of forward: the operations of "
        "positions that see neither tissue nor the border. A network that sees 435 positions spreads tissue far on a "
        "small image, and each stored map counts a tile's width more: the larger the image, the nearer the ratio comes "
        "to its bound. *Padded* are the same images as ordinary tensors, which are compared once a step, or not looked "
        "at. Plans go by *rates* that were calibrated before, or by the built-in ones of an older processor.\n\n"
        + table(head, rows)
        + "".join(map(on_the_disk, filter(None, map(found_again, data["cases"].values()))))
    )


def found_again(case: Any) -> Any:
    """A case in which the bytes of the disk tier were counted."""
    return case if "found" in case else None


def on_the_disk(c: Any) -> str:
    moved = [[format_bytes(c[way][what]) for what in ("written", "read")] for way in ("found", "written again")]
    return (
        f"\nOf a step at {c['side']:,}² with {c['glass']:.0%} glass within {c['budget']}, {moved[0][0]} of maps and "
        f"their gradients are written to the disk and {moved[0][1]} read from it; {moved[1][0]} and {moved[1][1]} if "
        "tiles are written for which others stand.\n"
    )


def depths(data: Any) -> str:
    rows = [
        [
            str(c["layers"]),
            f"{c['deepest']} deep" if c["deepest"] else "nothing",
            format_bytes(c["budget_bytes"]),
            format_bytes(c["peak_bytes"]),
            f"**{c['peak_bytes'] / c['plain_bytes']:.2f}**",
            f"{100 * c['forwards recomputed']:.0f} %",
            f"{c['ratio']:.2f}",
        ]
        for c in sorted(data["cases"].values(), key=lambda c: (c["layers"], c["deepest allowed"]))
    ]
    head = ["layers", "dropped", "budget", "held", "memory of plain's", "forward recomputed", "time of plain's"]
    any_case = next(iter(data["cases"].values()))
    return (
        "## Without a lower tier: dropping deeper\n\nChains of convolutions with train-mode BatchNorm, each of which "
        f"needs the whole of the map before it ({format_bytes(any_case['map_bytes'])} at {any_case['side']}²), on the "
        "device alone. The budget is 5 % more than the smallest that works where maps may be dropped that deep; *held* "
        "is by the allocator's books.\n\n" + table(head, rows)
    )


def time_ranking(data: Any) -> str:
    rows = [
        [
            c["network"],
            f"{c['side']}²",
            str(c["threads"]),
            str(len(c["plans"])),
            f"**{c['spearman']:.2f}**",
            f"{c['spearman_processor']:.2f}",
        ]
        for c in data["cases"].values()
    ]
    head = ["network", "image", "threads", "plans", "Spearman, time by the clock", "Spearman, processor time"]
    return (
        "## Is predicted time in the right order?\n\nDifferent plans of one network and image, by a seeded choice "
        "among budgets, policies, halos and fixed grids: their predicted time against what their steps took, with "
        "rates calibrated before. The aim is 0.9.\n\n" + table(head, rows) + "\n"
        "![Measured against predicted seconds of the plans, on logarithmic scales.](figures/time-ranking.png)\n"
    )


def planner_speed(data: Any) -> str:
    rows = [
        [
            name,
            f"{c['side']:,}²",
            c["budget"],
            f"**{c['seconds']:.1f} s**",
            f"{c['allowed']} s",
            f"{c['seconds of imports']:.1f} s",
            f"{1000 * c['seconds from the cache']:.0f} ms",
            str(c["segments"]),
        ]
        for name, c in data["cases"].items()
    ]
    head = ["network", "image", "budget", "planning", "aim", "imports", "from the cache", "segments"]
    return (
        "## How long planning takes\n\nProcessor time on one thread, rehearsals included. Each network was planned "
        "twice, in processes with different hash seeds, and the plans were equal. *Imports* are PyTorch's own, its "
        "compiler above all, which the first optimizer of a process brings, and the first plan where there is none. "
        "*From the cache* is what a process needs to come by a plan that an earlier one has made, without Python's "
        "collector of cycles.\n\n" + table(head, rows)
    )


def recipes(data: Any) -> str:
    rows = []
    for name, c in data["cases"].items():
        slower = c["predicted time over that of a search"]
        rows.append(
            [
                name,
                f"{c['side']:,}² ± 20 %",
                c["budget"],
                str(c["sizes"]),
                str(c["searches"]),
                f"{c['seconds of the first']:.1f} s",
                f"{c['median seconds of a further size']:.2f} s",
                f"{c['looked up']}, {c['median seconds of what was looked up'] * 1000:.0f} ms",
                f"{c['seconds of all']:.0f} s",
                f"{c['least of formula over rehearsal']:.3f} to {c['most of formula over rehearsal']:.3f}",
                f"{slower[0]:.2f} to {slower[1]:.2f}" if slower else "–",
            ]
        )
    head = [
        "network",
        "images",
        "budget",
        "sizes",
        "searched",
        "first",
        "median of the others",
        "looked up, median",
        "all",
    ]
    head += ["memory, formula to rehearsal", "predicted time, to a search's"]
    return (
        "### Slides of many sizes\n\nA plan that was found for one size serves those near it. What it holds there is "
        "looked up where rehearsals of other sizes tell it to a hundredth; else it is rehearsed, which teaches more: "
        "the more sizes there were, the more are looked up. Processor time on one thread.\n\n" + table(head, rows)
    )


def planner_memory(data: Any) -> str:
    rows = [[k, f"{v:.4g}" if isinstance(v, float) else str(v)] for k, v in data["values"].items()]
    return (
        "## Is the budget kept?\n\nRandom networks at random sizes under budgets between the smallest that works and "
        "what plain PyTorch uses, by the books of PyTorch's own allocator: the most that a step held between "
        "operators.\n\n" + table(["", ""], rows)
    )


def small_tiles(data: Any) -> str:
    rows = [
        [
            name,
            f"{c['side']:,}²",
            f"{c['tiles']} x {c['tiles']}",
            f"**{c['ratio']:.1f}**",
            f"{min(c['ratios']):.1f} to {max(c['ratios']):.1f}",
            f"{c['ratio compiled']:.1f}",
            f"{c['operators of a tile']:.0f}",
            f"{c['operators of a crop']:.0f}",
        ]
        for name, c in data["cases"].items()
    ]
    head = ["network", "image", "tiles", "ratio", "all ratios", "compiled", "operators of a tile", "of a crop"]
    return (
        "## What tiny tiles cost\n\nProcessor time of a step, on one thread, to that of as many eager crops of the "
        "tiles' own size; so narrow a network that arithmetic hardly counts. A tile goes through the network forward "
        "twice and back once, a crop forward once. With kernels of 3 x 3 a tile of 16 x 16 reads 115 x 115, and most "
        "of the ratio is the work of halos; with kernels of 1 x 1 it computes what a crop does. Compiled are "
        'tiles of `compile="tiles"`, once all of their kinds are: what they save is the work of Python.\n\n'
        + table(head, rows)
    )


def gpu(data: Any) -> str:
    cases: dict[str, Any] = data["cases"]
    tiny = cases.get("tiny tiles", {})
    rows = [
        [
            name.removeprefix("large "),
            format_bytes(c["budget"]),
            format_bytes(c["peak"]),
            milliseconds(c.get("plain_seconds")),
            format_bytes(c["plain_peak"]) if "plain_peak" in c else "does not fit",
            milliseconds(c.get("tiled_seconds", c.get("seconds"))),
            f"**{c['ratio']:.1f}**" if "ratio" in c else "–",
            milliseconds(c["predicted_seconds"]),
            f"{c['plan_seconds']:.0f} s",
        ]
        for name, c in cases.items()
        if "budget" in c
    ]
    head = ["case", "budget", "peak", "plain", "plain's peak", "tiled", "ratio", "predicted", "planning"]
    grids = {name: ratio for name, ratio in tiny.items() if "x" in name}
    device = cases["rates"]["machine"]["device"]
    return (
        f"## On a GPU\n\nOne {device}, by `python -m benchmarks.gpu`. Maps that leave the device lie in pinned memory "
        "of the host, where kernels read and write them. Time is not yet what a GPU could do: a plain step takes a "
        "hundredth of what it takes on a processor, and what the engine does in Python (it records the network in each "
        "step, and asks every operator where every tile lies) no longer hides behind it. Workspaces of cuDNN, of which "
        "a plan allows for a part, are in the peaks: they are why VGG-16's is above its budget.\n\n"
        + table(head, rows)
        + "\nA step of ResNet-18 on 2,048² in ever smaller tiles, in plain PyTorch's steps of "
        + f"{milliseconds(tiny.get('plain_seconds'))}: "
        + ", ".join(f"{name} tiles {ratio:.1f}" for name, ratio in grids.items())
        + ".\n"
    )


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:,.0f} ms"


def split_study(data: Any) -> str:
    """Accuracy of split training beside exact: the mean over seeds, and the span where there are several."""
    cases = data["cases"]
    waves = sorted(int(n.split()[-1]) for n in cases["exact"]["runs"][0] if n.startswith("accuracy at"))
    names = ["accuracy", *(f"accuracy at {w}" for w in waves), "accuracy if split"]
    rows = []
    for name, case in sorted(cases.items(), key=lambda item: order_of(item[1]["how"])):
        how, runs = case["how"], case["runs"]
        about = ["–", "–"] if not how else [f"{100 * how['split_depth']:g} %", str(how["splits"] ** 2)]
        kind = name.split(" ")[0].replace("_", " ")
        rows.append([kind, *about, str(len(runs)), *(spread([100 * r[n] for r in runs if n in r]) for n in names)])
    head = ["training", "depth", "splits", "seeds", "all", *(f"wave of {w}" for w in waves), "all, evaluated split"]
    steps = cases["exact"]["runs"][0]["steps"]
    return (
        "## What splits cost in accuracy\n\nSplit-CNN's question (its Table 1), on a task made for it: a ResNet-18 "
        "with an eighth of its width learns from noisy images of 32 x 32 in which of eight directions a wave runs; a "
        "wave as long as the image shows it only across splits. Depth is the share of convolutions that is split, "
        "evaluation is unsplit, and in the last column split as in training; all runs of a seed see the same images, "
        f"in {steps} steps. Figures are test accuracies in per cent, the mean and, of several seeds, from the least to "
        "the greatest. At a depth of 75 % the map where splits end has 8 positions, and the paper's bounds for ω = 0.2 "
        "hold one whole number for each cut: stochastic cuts do not move there. Few steps and few seeds, and chance is "
        "12.5: seeds of one row differ by as much as rows do, and single runs end near chance, so the table does not "
        "say which way is better, and bears Split-CNN's figures neither out nor against. Why those runs fail was not "
        "looked into: the last column, which would tell a training that failed from an evaluation that does not suit "
        "it, is of one seed, and agrees there with evaluation without splits to two points.\n\n" + table(head, rows)
    )


def order_of(how: dict[str, Any]) -> tuple[Any, ...]:
    return how.get("split_depth", 0), how.get("splits", 0), how.get("halo", "")


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    mean = f"{sum(values) / len(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.1f} to {max(values):.1f})"


#: What is told of each file of results, in the order of the page.
SECTIONS: dict[str, Callable[[Any], str]] = {
    "against_plain": against_plain,
    "gpu": gpu,
    "policies": policies,
    "largest_image": largest_image,
    "planner_memory": planner_memory,
    "process_peak": process_peak,
    "glass": glass,
    "whole_slide": whole_slide,
    "depths": depths,
    "deep": deep,
    "time_ranking": time_ranking,
    "planner_speed": planner_speed,
    "recipes": recipes,
    "small_tiles": small_tiles,
    "streamed": streamed,
    "offloading": offloading,
    "split_study": split_study,
}


def write_page() -> None:
    """Sections whose files are there."""
    files = {name: RESULTS / f"{name}.json" for name in SECTIONS}
    parts = [SECTIONS[name](json.loads(path.read_text())) for name, path in files.items() if path.exists()]
    PAGE.write_text("\n".join([INTRODUCTION, *parts]))
    print(PAGE)


if __name__ == "__main__":
    write_page()
