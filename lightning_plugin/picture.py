"""A plan for people: a table to read, a picture to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_plugin.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lightning_plugin.plan import Plan, SegmentPlan
    from lightning_plugin.planner.sweep import Sweep

HEADINGS = ("segment", "mode", "forward", "backward", "stored", "on", "peak", "time", "recompute")


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row of words for each segment."""
    return [
        (
            s.path or "(nodes " + ", ".join(map(str, s.targets)) + ")",
            mode(s),
            str(s.forward),
            str(s.backward),
            format_bytes(s.stored_bytes),
            s.tier,
            format_bytes(max(s.forward_bytes, s.backward_bytes)),
            format_seconds(s.seconds),
            f"{100 * s.recompute:.0f} %",
        )
        for s in plan.segments
    ]


def mode(segment: SegmentPlan) -> str:
    """How a segment runs, in a word or two."""
    if segment.keep:
        return "kept"
    words = ("scanned" if segment.halo == "share" else "tiled") + (" ahead" if segment.ahead else "")
    return f"{words}, dropped" if segment.drop else words


def table(plan: Plan) -> str:
    """The plan as text: a line for each segment, and the sums."""
    head = "Plan"
    if plan.shape:
        head += " for " + " x ".join(map(str, plan.shape))
    if plan.budget:
        head += f" within {format_bytes(plan.budget)}"
    sums = (
        f"peak {format_bytes(plan.peak_bytes)} on the device; {format_seconds(plan.seconds)} a step; "
        f"{100 * plan.recompute:.0f} % recomputed\n"
        f"plain PyTorch would hold {format_bytes(plan.plain_bytes)} for backward "
        f"({format_bytes(plan.plain_bytes - plan.index_bytes)} without pooling indices and masks)"
    )
    lower = {tier: sum(s.stored_bytes for s in plan.segments if s.tier == tier) for tier in ("host", "disk")}
    spilled = [f"{format_bytes(size)} of maps on the {tier}" for tier, size in lower.items() if size]
    if spilled:
        sums += "\n" + " and ".join(spilled) + ", and as much again for their gradients"
    barriers = [f"run whole, for want of a tiling rule: {b}" for b in plan.barriers]
    return "\n".join([head, *columns(HEADINGS, rows(plan)), sums, *barriers])


def columns(headings: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(r[i]) for r in [headings, *body]) for i in range(len(headings))]

    def line(cells: tuple[str, ...]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()

    return [line(headings), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, body)]


COLOURS = {"device": "#4878a8", "host": "#e49444", "disk": "#85b6b2", "tiles": "#d1605e"}


@dataclass(frozen=True)
class Moment:
    """A segment's forward or backward: when, what is stored on each tier, and the most that is on the device."""

    begin: float
    seconds: float
    stored: dict[str, int]
    peak: int


def moments(plan: Plan) -> list[Moment]:
    """The step as the plan predicts it: every segment forward, then in reverse backward, which takes twice as long.

    A plan does not say who reads a map: a dropped one is drawn as if only the next segment did.
    """
    forward: list[tuple[SegmentPlan, dict[str, int]]] = []
    backward: list[tuple[SegmentPlan, dict[str, int]]] = []
    stored = dict.fromkeys(("device", "host", "disk"), 0)
    run: list[int] = []  # the dropped maps up to here, with nothing stored between them
    for s in plan.segments:
        there = {**stored, s.tier: stored[s.tier] + s.stored_bytes}
        back = stored if s.drop else there
        forward.append((s, {**there, "device": there["device"] + sum(run[-1:])}))
        backward.append((s, {**back, "device": back["device"] + sum(run)}))
        stored, run = (stored, [*run, s.stored_bytes]) if s.drop else (there, [])
    found: list[Moment] = []
    begin = 0.0
    for s, there in forward:
        found.append(Moment(begin, s.seconds / 3, there, s.forward_bytes))
        begin += s.seconds / 3
    for s, there in reversed(backward):
        found.append(Moment(begin, 2 * s.seconds / 3, there, s.backward_bytes))
        begin += 2 * s.seconds / 3
    return found


def draw(plan: Plan, path: str) -> None:
    """Memory over the step, segment by segment, forward then backward, against the budget; lower tiers below."""
    from matplotlib.figure import Figure

    steps = moments(plan)
    spills = any(m.stored["host"] + m.stored["disk"] for m in steps)
    figure = Figure(figsize=(10, 6.5 if spills else 4.5), layout="constrained")
    panels = figure.subplots(2 if spills else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + spills])[
        :, 0
    ]
    draw_device(panels[0], plan, steps)
    if spills:
        draw_lower(panels[1], steps)
    end = steps[-1].begin + steps[-1].seconds if steps else 1
    for axes in panels:
        axes.axvline(end / 3, color="grey", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for where, words in ((end / 6, "forward"), (2 * end / 3, "backward")):
        panels[0].annotate(words, (where, 1.01), xycoords=("data", "axes fraction"), ha="center")
    panels[-1].set(xlabel="predicted seconds", xlim=(0, end or 1))
    figure.savefig(path, dpi=130)


def draw_device(axes: Any, plan: Plan, steps: list[Moment]) -> None:
    scale, unit = scale_of(max(plan.peak_bytes, plan.budget or 0))
    left, width = spans(steps)
    peak = [m.peak / scale for m in steps]
    held = [m.stored["device"] / scale for m in steps]
    axes.bar(left, peak, width, align="edge", color=COLOURS["tiles"], label="tiles, cotangents,\nparameters")
    axes.bar(left, held, width, align="edge", color=COLOURS["device"], label="stored maps")
    if plan.budget:
        axes.axhline(
            plan.budget / scale,
            color="black",
            linestyle="--",
            linewidth=1,
            label=f"budget, {format_bytes(plan.budget)}",
        )
    axes.set_ylabel(f"on the device, {unit}")


def draw_lower(axes: Any, steps: list[Moment]) -> None:
    scale, unit = scale_of(max(m.stored["host"] + m.stored["disk"] for m in steps))
    left, width = spans(steps)
    below = [0.0] * len(steps)
    for tier in ("host", "disk"):
        stored = [m.stored[tier] / scale for m in steps]
        if any(stored):
            axes.bar(left, stored, width, below, align="edge", color=COLOURS[tier], label=f"maps on the {tier}")
        below = [a + b for a, b in zip(below, stored)]
    axes.set_ylabel(f"on lower tiers, {unit}")


def spans(steps: list[Moment]) -> tuple[list[float], list[float]]:
    """Where bars begin and how wide they are: wide enough to be seen."""
    end = steps[-1].begin + steps[-1].seconds if steps else 0.0
    return [m.begin for m in steps], [max(m.seconds, end / 1000) for m in steps]


def scale_of(size: int) -> tuple[int, str]:
    """What to divide bytes by, and the name of the unit."""
    return (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")


SWEEP_HEADINGS = ("budget", "peak", "time", "of plain", "recompute", "host", "disk", "segments", "")


def sweep_table(sweep: Sweep) -> str:
    """A line for each budget; the last is what plain PyTorch needs."""
    plans = [*sweep.plans]
    if sweep.asked is not None:
        plans = sorted([*plans, sweep.asked], key=lambda p: p.budget or 0)
    body = [
        (
            format_bytes(p.budget or 0),
            format_bytes(p.peak_bytes),
            format_seconds(p.seconds),
            f"{p.seconds / (sweep.plain.seconds or 1):.2f}",
            f"{100 * p.recompute:.0f} %",
            *(format_bytes(stored) if (stored := stored_on(p, tier)) else "-" for tier in ("host", "disk")),
            str(len(p.segments)),
            note(p, sweep),
        )
        for p in plans
    ]
    head = "Time against budget"
    if sweep.plain.shape:
        head += " for " + " x ".join(map(str, sweep.plain.shape))
    return "\n".join([head, *columns(SWEEP_HEADINGS, body)])


def stored_on(plan: Plan, tier: str) -> int:
    """The bytes of the maps that a plan stores on a tier."""
    return sum(s.stored_bytes for s in plan.segments if s.tier == tier and not s.keep)


def note(plan: Plan, sweep: Sweep) -> str:
    """What a line of the sweep's table stands for, where it is not just any budget."""
    if plan is sweep.asked:
        return "asked for"
    if plan is sweep.plain:
        return "plain PyTorch"
    return "the smallest" if plan is sweep.plans[0] else ""


def draw_sweep(sweep: Sweep, path: str) -> None:
    """Seconds of a step against the budget, which has a logarithmic scale."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    budgets = [p.budget or 0 for p in sweep.plans]
    seconds = [p.seconds for p in sweep.plans]
    spilled = [bool(stored_on(p, "host") or stored_on(p, "disk")) for p in sweep.plans]
    axes.plot(budgets, seconds, color=COLOURS["device"], zorder=1)
    for chosen, colour, label in (
        (False, COLOURS["device"], "all on the device"),
        (True, COLOURS["host"], "with maps on lower tiers"),
    ):
        here = [(b, t) for b, t, away in zip(budgets[:-1], seconds[:-1], spilled) if away is chosen]
        if here:
            axes.scatter(*zip(*here), color=colour, label=label, zorder=2)
    for plan, marker, colour, label in (
        (sweep.plain, "s", "black", "plain PyTorch"),
        (sweep.asked, "*", COLOURS["tiles"], "asked for"),
    ):
        if plan is not None:
            axes.scatter([plan.budget or 0], [plan.seconds], s=140, marker=marker, color=colour, label=label, zorder=3)
            words = f"{format_bytes(plan.budget or 0)}\n{format_seconds(plan.seconds)}"
            axes.annotate(words, (plan.budget or 0, plan.seconds), (0, 12), textcoords="offset points", ha="center")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_bytes(x)))
    axes.set(
        xlabel="budget on the device",
        ylabel="predicted seconds of a step",
    )
    if max(seconds) > 8 * min(seconds):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda t, _: format_seconds(t)))
        axes.set_ylim(min(seconds) / 1.5, 2 * max(seconds))
    else:
        axes.set_ylim(0, 1.15 * max(seconds))
    if sweep.plain.shape:
        axes.set_title(" × ".join(map(str, sweep.plain.shape)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
