"""Views of plans: a table, a picture of memory over a step, and a table of time against budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lightning_plugin.units import format_bytes, format_seconds

if TYPE_CHECKING:  # `plan` imports this file
    from lightning_plugin.plan import ChainPlan, Plan, SegmentPlan

HEADINGS = ("segment", "mode", "forward", "backward", "stored", "on", "peak", "time", "recompute")
#: Additional column of plans with streamed parameters.
FETCHES = "fetches"
COLOURS = {
    "fixed": "#9aa0a6", "copies": "#c9b27c", "device": "#4878a8", "tiles": "#d1605e", "host": "#e49444",
    "disk": "#85b6b2", "dropped": "#b8c9dc", "kept": "#d9d9d9", "tiled": "#f2cfce", "scanned": "#d8c9e4",
    "chain": "#cfe3d4",
}  # fmt: skip
#: Number of segments up to which the picture names each of them.
MAX_NAMES = 48
#: Number of last parts of a module's path in a name.
LAST_PARTS = 3


@dataclass(frozen=True)
class Part:
    """Row of a table: a segment or a chain.

    Attributes:
        kind: "kept", "tiled", "scanned" or "chain".
        mode: The kind with its options.
        path: Modules.
        forward: Grid of forward, as text.
        backward: Grid of backward, as text.
        stored: Bytes of stored maps.
        tier: Tier of the stored maps.
        drop: Depth to which they are dropped.
        forward_bytes: Peak on the device during forward.
        backward_bytes: Peak on the device during backward.
        seconds: Time in a step.
        recompute: Recomputed work, as a share of the forward work.
        copied: Bytes of copies of parameters.
    """

    kind: str
    mode: str
    path: str
    forward: str
    backward: str
    stored: int
    tier: str
    drop: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    recompute: float
    copied: int = 0


def parts(plan: Plan) -> list[Part]:
    """List the segments and chains of a plan, in order."""
    found = [(segment.targets[:1], of_segment(segment)) for segment in plan.segments]
    for chain in plan.chains:
        index = sum(targets < (chain.node,) for targets, _ in found)
        found.insert(index, ((chain.node,), of_chain(chain)))
    return [part for _, part in found]


def of_segment(s: SegmentPlan) -> Part:
    f = s.forecast
    return Part(
        kind(s),
        mode(s),
        s.path or "(nodes " + ", ".join(map(str, s.targets)) + ")",
        str(s.forward),
        str(s.backward),
        f.stored_bytes,
        s.tier,
        s.drop,
        f.forward_bytes,
        f.backward_bytes,
        f.seconds,
        f.recompute,
        f.copied_bytes,
    )


def of_chain(c: ChainPlan) -> Part:
    f = c.forecast
    tiled = [s for s in c.segments if not s.keep]
    slots = f", {c.slots} slot{'s' * (c.slots != 1)}" if c.kept < c.count else ""
    kept = f", {c.kept} kept" if c.kept else ""
    return Part(
        "chain",
        f"chain of {c.count}{slots}{kept}",
        c.path or f"(node {c.node})",
        "-" if not tiled else str(tiled[0].forward),
        "-" if not tiled else str(tiled[0].backward),
        c.slots * f.slot_bytes + c.kept * f.kept_bytes,
        "device",
        0,
        f.peak_bytes,
        f.peak_bytes,
        f.seconds,
        f.forwards / c.count,
        c.count * sum(s.forecast.copied_bytes for s in c.segments),
    )


def kind(segment: SegmentPlan) -> str:
    """Name the way in which a segment runs."""
    return "kept" if segment.keep else "scanned" if segment.halo == "share" else "tiled"


def mode(segment: SegmentPlan) -> str:
    """Name the way in which a segment runs, with its options."""
    pieces = f", keys in {segment.pieces} pieces" if segment.pieces > 1 else ""
    recalled = ", recalled" if segment.recall else ""
    return kind(segment) + (" ahead" if segment.ahead else "") + pieces + dropped(segment) + recalled


def dropped(segment: SegmentPlan) -> str:
    return "" if not segment.drop else ", dropped" if segment.drop == 1 else f", dropped {segment.drop} deep"


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """Format a row of the table for each segment and chain."""
    return [
        (
            part.path,
            part.mode,
            part.forward,
            part.backward,
            format_bytes(part.stored),
            part.tier,
            format_bytes(max(part.forward_bytes, part.backward_bytes)),
            format_seconds(part.seconds),
            f"{100 * part.recompute:.0f} %",
            *((format_bytes(part.copied),) if plan.forecast.streamed_bytes else ()),
        )
        for part in parts(plan)
    ]


def head(plan: Plan) -> str:
    """Format the image and the budget of a plan."""
    image = " for " + " x ".join(map(str, plan.shape)) if plan.shape else ""
    return f"Plan{image}" + (f" within {format_bytes(plan.budget)}" if plan.budget else "")


def cost(plan: Plan) -> str:
    """Format memory, time and recomputation of a step."""
    expected = plan.forecast
    return (
        f"peak {format_bytes(expected.peak_bytes)} on the device; {format_seconds(expected.seconds)} a step; "
        f"{100 * expected.recompute:.0f} % recomputed"
    )


def summary(plan: Plan) -> str:
    """Format a plan as one line."""
    return f"{head(plan)}: {cost(plan)}"


def table(plan: Plan) -> str:
    """Format a plan as a table: a line for each segment, and the totals."""
    expected = plan.forecast
    sums = cost(plan)
    if plan.trains:
        sums += (
            f"\nplain PyTorch would hold {format_bytes(expected.plain_bytes)} for backward "
            f"({format_bytes(expected.plain_bytes - expected.index_bytes)} without pooling indices and masks)"
        )
    if expected.reserve_bytes:
        reserve = format_bytes(expected.reserve_bytes)
        sums += f"\n{reserve} of the peak are left to the workspaces of the device's libraries"
    lower = {tier: size for tier in ("host", "disk") if (size := plan.stored_on(tier))}
    offloaded = [f"{format_bytes(size)} of maps on the {tier}" for tier, size in lower.items()]
    if offloaded:
        sums += "\n" + " and ".join(offloaded) + (", and as much again for their gradients" if plan.trains else "")
    if expected.streamed_bytes:
        tiers = " and ".join(f"the {tier}" for tier, on in (("host", plan.on_host), ("disk", plan.on_disk)) if on)
        sums += (
            f"\n{format_bytes(expected.streamed_bytes)} of parameters live on {tiers}, with gradients and optimizer "
            f"states; {format_bytes(expected.traffic_bytes)} are transferred in a step"
            + (", ahead of their use" if plan.fetched_ahead else "")
        )
    barriers = [f"run whole, for want of a tiling rule: {b}" for b in plan.barriers]
    headings = (*HEADINGS, FETCHES) if expected.streamed_bytes else HEADINGS
    approximate = [f"an approximation in training: {plan.approximation}"] if plan.approximation else []
    return "\n".join([head(plan), *columns(headings, rows(plan)), sums, *barriers, *approximate])


def columns(headings: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    """Align the lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(r[i]) for r in [headings, *body]) for i in range(len(headings))]

    def line(cells: tuple[str, ...]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()

    return [line(headings), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, body)]


#: Note on the times of a sweep.
PREDICTED = (
    "Times are predicted by the device's rates: arithmetic, memory, transfers and the start of each operator. They "
    "rank plans; the engine's own work on the host, which is most of a short step, is not in them."
)
SWEEP_HEADINGS = ("budget", "peak", "time", "of plain", "recompute", "host", "disk", "segments", "")


def sweep_table(plans: Sequence[Plan], plain: Plan, asked: Plan | None) -> str:
    """Format a table with a line for each budget; the last line is plain PyTorch's."""
    smallest = plans[0]
    if asked is not None:
        plans = sorted([*plans, asked], key=lambda p: p.budget or 0)
    body = [
        (
            format_bytes(p.budget or 0),
            format_bytes(p.forecast.peak_bytes),
            format_seconds(p.forecast.seconds),
            f"{p.forecast.seconds / (plain.forecast.seconds or 1):.2f}",
            f"{100 * p.forecast.recompute:.0f} %",
            *(format_bytes(stored) if (stored := p.stored_on(tier)) else "-" for tier in ("host", "disk")),
            str(len(p.segments) + len(p.chains)),
            "asked for" if p is asked else "plain PyTorch" if p is plain else "the smallest" if p is smallest else "",
        )
        for p in plans
    ]
    head = "Time against budget"
    if plain.shape:
        head += " for " + " x ".join(map(str, plain.shape))
    return "\n".join([head, *columns(SWEEP_HEADINGS, body), PREDICTED])


@dataclass(frozen=True)
class Moment:
    """Forward or backward of a segment or chain, in a picture.

    Attributes:
        begin: Seconds since the step's begin.
        seconds: Duration.
        stored: Bytes stored on each tier.
        peak: Peak on the device.
        copied: Bytes of copies of parameters.
    """

    begin: float
    seconds: float
    stored: dict[str, int]
    peak: int
    copied: int = 0


def moments(plan: Plan) -> list[Moment]:
    """Divide a step into forward and backward of its parts; backward takes twice the time of forward.

    Dropped maps are not drawn as stored: the peaks contain them.
    """
    stored = dict.fromkeys(("device", "host", "disk"), 0)
    forward: list[tuple[Part, dict[str, int]]] = []
    for s in parts(plan):
        stored = stored if s.drop else {**stored, s.tier: stored[s.tier] + s.stored}
        forward.append((s, stored))
    turns = [(s, there, s.seconds / 3, s.forward_bytes) for s, there in forward]
    turns += [(s, there, 2 * s.seconds / 3, s.backward_bytes) for s, there in reversed(forward)]
    begins = accumulate((seconds for _, _, seconds, _ in turns), initial=0.0)
    return [Moment(begin, seconds, there, peak, s.copied) for begin, (s, there, seconds, peak) in zip(begins, turns)]


def draw(plan: Plan, path: str) -> None:
    """Draw memory over a step against the budget, lower tiers below it, and the network with its segments."""
    from matplotlib.figure import Figure

    steps = moments(plan)
    offloads = any(m.stored["host"] + m.stored["disk"] for m in steps)
    heights = [3.2, *([1.4] if offloads else []), 2.2]
    figure = Figure(figsize=(10, sum(heights) + 2.4), layout="constrained")
    device, *lower, network = figure.subplots(len(heights), 1, height_ratios=heights)
    draw_device(device, plan, steps)
    for axes in lower:
        draw_lower(axes, steps)
    end = steps[-1].begin + steps[-1].seconds if steps else 1
    for axes in (device, *lower):
        axes.axvline(end / 3, color="grey", linewidth=0.8)
        axes.set_xlim(0, end or 1)
        axes.tick_params(labelbottom=axes is (lower or [device])[-1])
    (lower or [device])[-1].set_xlabel("predicted seconds")
    for where, words in ((end / 6, "forward"), (2 * end / 3, "backward")):
        device.annotate(words, (where, 1.01), xycoords=("data", "axes fraction"), ha="center")
    meaning = draw_network(network, plan)
    for axes in (device, *lower, network):
        axes.spines[["top", "right"]].set_visible(False)
        shown = {"handles": meaning} if axes is network else {}
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, **shown)
    if plan.approximation:
        figure.suptitle(f"an approximation in training: {plan.approximation}", fontsize=9, wrap=True)
    figure.savefig(path, dpi=130)


def draw_device(axes: Any, plan: Plan, steps: list[Moment]) -> None:
    scale, unit = scale_of(max(plan.forecast.peak_bytes, plan.budget or 0))
    fixed = plan.forecast.fixed_bytes
    left, width = spans(steps)
    layers = {
        "tiles": ("tiles, gradients of maps", [m.peak for m in steps]),
        "device": ("stored maps", [fixed + m.copied + m.stored["device"] for m in steps]),
        "copies": ("copies of parameters", [fixed + m.copied for m in steps]),
        "fixed": ("parameters and\ntheir gradients", [fixed for _ in steps]),
    }
    if not any(m.copied for m in steps):
        del layers["copies"]
    for name, (label, sizes) in layers.items():  # each in front of the one before, from the same floor
        heights = [min(size, m.peak) / scale for size, m in zip(sizes, steps, strict=True)]
        axes.bar(left, heights, width, align="edge", color=COLOURS[name], label=label)
    if plan.budget:
        line = f"budget, {format_bytes(plan.budget)}"
        axes.axhline(plan.budget / scale, color="black", linestyle="--", linewidth=1, label=line)
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


def draw_network(axes: Any, plan: Plan) -> list[Any]:
    """Draw segments and chains side by side, each with the bytes that it stores, and return the legend."""
    from matplotlib.patches import Patch

    shown = parts(plan)
    scale, unit = scale_of(max((s.stored for s in shown), default=0))
    meaning: dict[str, str] = {}
    for place, s in enumerate(shown):
        axes.axvspan(place, place + 1, color=COLOURS[s.kind], alpha=0.6, linewidth=0)
        axes.axvline(place + 1, color="white", linewidth=1)
        meaning.setdefault("chain of links" if s.kind == "chain" else f"{s.kind} segment", COLOURS[s.kind])
        if stored := s.stored:
            where, words = holding(s)
            middle, width = (place + 0.85, 0.3) if s.kind in ("tiled", "scanned") else (place + 0.5, 0.8)
            axes.bar(middle, stored / scale, width, color=COLOURS[where], edgecolor="black", linewidth=0.4)
            meaning.setdefault(words, COLOURS[where])
    named = range(0, len(shown), -(-len(shown) // MAX_NAMES) or 1)
    axes.set_xticks(
        [place + 0.5 for place in named],
        [name(shown[place]) for place in named],
        rotation=90,
        fontsize=8 if len(shown) <= 24 else 5,
    )
    axes.set(xlim=(0, len(shown)), ylabel=f"stored at the cut, {unit}")
    return [Patch(color=colour, label=label) for label, colour in meaning.items()]


def holding(part: Part) -> tuple[str, str]:
    """Return the colour and the legend's label of the bytes that a part stores."""
    if part.drop:
        return "dropped", "dropped, recomputed"
    if part.kind == "kept":
        return "device", "saved for backward"
    if part.kind == "chain":
        return "device", "slots, and saved for backward"
    return part.tier, f"on the {part.tier}"


def name(part: Part) -> str:
    """Shorten a part's modules, with its number of links or its backward grid, to an axis label."""
    short = " … ".join(".".join(end.split(".")[-LAST_PARTS:]) for end in part.path.split(" … "))
    more = {"kept": "", "chain": f"  {part.mode.partition(',')[0]}"}.get(part.kind, f"  {part.backward}")
    return short + more


def spans(steps: list[Moment]) -> tuple[list[float], list[float]]:
    """Return the left ends and the widths of bars, wide enough to be visible."""
    end = steps[-1].begin + steps[-1].seconds if steps else 0.0
    return [m.begin for m in steps], [max(m.seconds, end / 1000) for m in steps]


def scale_of(size: int) -> tuple[int, str]:
    """Return the divisor of bytes, and the name of the unit."""
    return (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")


def draw_sweep(plans: Sequence[Plan], plain: Plan, asked: Plan | None, path: str) -> None:
    """Draw seconds of a step against the budget, on a logarithmic scale."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    budgets = [p.budget or 0 for p in plans]
    seconds = [p.forecast.seconds for p in plans]
    offloaded = [bool(p.stored_on("host") or p.stored_on("disk")) for p in plans]
    axes.plot(budgets, seconds, color=COLOURS["device"], zorder=1)
    for chosen, colour, label in (
        (False, COLOURS["device"], "all on the device"),
        (True, COLOURS["host"], "with maps on lower tiers"),
    ):
        here = [(b, t) for b, t, away in zip(budgets[:-1], seconds[:-1], offloaded) if away is chosen]
        if here:
            axes.scatter(*zip(*here), color=colour, label=label, zorder=2)
    for plan, marker, colour, label in (
        (plain, "s", "black", "plain PyTorch"),
        (asked, "*", COLOURS["tiles"], "asked for"),
    ):
        if plan is not None:
            budget, time = plan.budget or 0, plan.forecast.seconds
            axes.scatter([budget], [time], s=140, marker=marker, color=colour, label=label, zorder=3)
            words = f"{format_bytes(budget)}\n{format_seconds(time)}"
            axes.annotate(words, (budget, time), (0, 12), textcoords="offset points", ha="center")
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
    if plain.shape:
        axes.set_title(" × ".join(map(str, plain.shape)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
