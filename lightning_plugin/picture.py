"""Plans for people who would rather look: memory over a step and the network's cuts; time against budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_plugin.dropped import Dropped, staying
from lightning_plugin.plan_fields import BarePlan
from lightning_plugin.plan_parts import Part, parts
from lightning_plugin.plan_table import stored_on
from lightning_plugin.units import format_bytes, format_seconds

COLOURS = {
    "fixed": "#9aa0a6", "copies": "#c9b27c", "device": "#4878a8", "tiles": "#d1605e", "host": "#e49444",
    "disk": "#85b6b2", "dropped": "#b8c9dc", "kept": "#d9d9d9", "tiled": "#f2cfce", "scanned": "#d8c9e4",
    "chain": "#cfe3d4",
}  # fmt: skip
#: Of more segments than this, only some have their name below them.
MOST_NAMES = 48
#: And of a module's path, its last parts.
LAST_PARTS = 3


@dataclass(frozen=True)
class Moment:
    """Forward or backward of a segment or chain: when, what is stored on each tier, the most that is on the device, and
    what of it are copies of parameters."""

    begin: float
    seconds: float
    stored: dict[str, int]
    peak: int
    copied: int = 0


def moments(plan: BarePlan) -> list[Moment]:
    """The step as the plan predicts it: all parts forward, then in reverse backward, which takes twice as long.

    A plan does not say who reads a map: a dropped one is drawn as if only the next segment did.
    """
    forward: list[tuple[Part, dict[str, int]]] = []
    backward: list[tuple[Part, dict[str, int]]] = []
    stored = dict.fromkeys(("device", "host", "disk"), 0)
    run: list[Dropped] = []  # up to here, with nothing stored between them
    for s in parts(plan):
        there = {**stored, s.tier: stored[s.tier] + s.stored}
        back = stored if s.drop else there
        forward.append((s, {**there, "device": there["device"] + sum(d.size for d in run[-1:])}))
        backward.append((s, {**back, "device": back["device"] + sum(d.size for d in staying(run))}))
        mine = Dropped(frozenset(), s.stored, 0, frozenset(), s.drop)
        stored, run = (stored, [*run, mine]) if s.drop else (there, [])
    found: list[Moment] = []
    begin = 0.0
    for s, there in forward:
        seconds = s.seconds / 3
        found.append(Moment(begin, seconds, there, s.forward_bytes, s.copied))
        begin += seconds
    for s, there in reversed(backward):
        seconds = 2 * s.seconds / 3
        found.append(Moment(begin, seconds, there, s.backward_bytes, s.copied))
        begin += seconds
    return found


def draw(plan: BarePlan, path: str) -> None:
    """Memory over the step against the budget, lower tiers below it, and the network with its cuts."""
    from matplotlib.figure import Figure

    steps = moments(plan)
    spills = any(m.stored["host"] + m.stored["disk"] for m in steps)
    heights = [3.2, *([1.4] if spills else []), 2.2]
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


def draw_device(axes: Any, plan: BarePlan, steps: list[Moment]) -> None:
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


def draw_network(axes: Any, plan: BarePlan) -> list[Any]:
    """Segments and chains side by side, on the cut after each what is stored there, in one that is kept what it saves,
    in a chain what it stores of its links; what the colours stand for."""
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
    named = range(0, len(shown), -(-len(shown) // MOST_NAMES) or 1)
    axes.set_xticks(
        [place + 0.5 for place in named],
        [name(shown[place]) for place in named],
        rotation=90,
        fontsize=8 if len(shown) <= 24 else 5,
    )
    axes.set(xlim=(0, len(shown)), ylabel=f"stored at the cut, {unit}")
    return [Patch(color=colour, label=label) for label, colour in meaning.items()]


def holding(part: Part) -> tuple[str, str]:
    """The colour and the words for what a part stores."""
    if part.drop:
        return "dropped", "dropped, made again"
    if part.keeps:
        return "device", "saved for backward"
    if part.kind == "chain":
        return "device", "slots, and saved for backward"
    return part.tier, f"on the {part.tier}"


def name(part: Part) -> str:
    """A part's modules, and how many links it has or how its backward is cut, short enough to stand below it."""
    short = " … ".join(".".join(end.split(".")[-LAST_PARTS:]) for end in part.path.split(" … "))
    more = {"kept": "", "chain": f"  {part.mode.partition(',')[0]}"}.get(part.kind, f"  {part.backward}")
    return short + more


def spans(steps: list[Moment]) -> tuple[list[float], list[float]]:
    """Where bars begin and how wide they are: wide enough to be seen."""
    end = steps[-1].begin + steps[-1].seconds if steps else 0.0
    return [m.begin for m in steps], [max(m.seconds, end / 1000) for m in steps]


def scale_of(size: int) -> tuple[int, str]:
    """What to divide bytes by, and the name of the unit."""
    return (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")


def draw_sweep(plans: Sequence[BarePlan], plain: BarePlan, asked: BarePlan | None, path: str) -> None:
    """Seconds of a step against the budget, which has a logarithmic scale."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    budgets = [p.budget or 0 for p in plans]
    seconds = [p.forecast.seconds for p in plans]
    spilled = [bool(stored_on(p, "host") or stored_on(p, "disk")) for p in plans]
    axes.plot(budgets, seconds, color=COLOURS["device"], zorder=1)
    for chosen, colour, label in (
        (False, COLOURS["device"], "all on the device"),
        (True, COLOURS["host"], "with maps on lower tiers"),
    ):
        here = [(b, t) for b, t, away in zip(budgets[:-1], seconds[:-1], spilled) if away is chosen]
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
