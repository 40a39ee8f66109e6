"""A plan for people: a table to read, a picture to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_plugin.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lightning_plugin.plan import Plan

HEADINGS = ("segment", "mode", "forward", "backward", "stored", "on", "peak", "time", "recompute")


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row of words for each segment."""
    return [
        (
            s.path or "(nodes " + ", ".join(map(str, s.targets)) + ")",
            "kept" if s.keep else "tiled",
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


def table(plan: Plan) -> str:
    """The plan as text: a line for each segment, and the sums."""
    body = rows(plan)
    widths = [max(len(r[i]) for r in [HEADINGS, *body]) for i in range(len(HEADINGS))]

    def line(cells: tuple[str, ...]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)])

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
    return "\n".join(
        [head, line(HEADINGS), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, body), sums, *barriers]
    )


COLOURS = {"device": "#4878a8", "host": "#e49444", "disk": "#85b6b2", "tiles": "#d1605e"}


def draw(plan: Plan, path: str) -> None:
    """Memory over the step, segment by segment, forward then backward, against the budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    scale = 2**30 if plan.peak_bytes >= 2**30 else 2**20
    unit = "GiB" if scale == 2**30 else "MiB"
    begin, device, lower = 0.0, 0, 0
    moments: list[tuple[float, float, int, int, int]] = []
    for s in plan.segments:
        device += s.stored_bytes if s.tier == "device" else 0
        lower += s.stored_bytes if s.tier != "device" else 0
        moments.append((begin, s.seconds / 3, device, lower, s.forward_bytes))
        begin += s.seconds / 3
    for s in reversed(plan.segments):
        moments.append((begin, 2 * s.seconds / 3, device, lower, s.backward_bytes))
        begin += 2 * s.seconds / 3
        device -= s.stored_bytes if s.tier == "device" else 0
        lower -= s.stored_bytes if s.tier != "device" else 0
    left = [m[0] for m in moments]
    width = [max(m[1], begin / 2000) for m in moments]
    held = [m[2] / scale for m in moments]
    axes.bar(
        left,
        [m[4] / scale for m in moments],
        width,
        align="edge",
        color=COLOURS["tiles"],
        label="tiles, cotangents, parameters",
    )
    axes.bar(left, held, width, align="edge", color=COLOURS["device"], label="stored on the device")
    axes.step(
        [*left, begin],
        [*(m[3] / scale for m in moments), 0],
        where="post",
        color=COLOURS["host"],
        label="stored on lower tiers",
    )
    if plan.budget:
        axes.axhline(plan.budget / scale, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"budget {format_bytes(plan.budget)}", (begin, plan.budget / scale), ha="right", va="bottom")
    axes.axvline(begin / 3, color="grey", linewidth=0.8)
    axes.annotate("forward", (begin / 6, 1.01), xycoords=("data", "axes fraction"), ha="center")
    axes.annotate("backward", (2 * begin / 3, 1.01), xycoords=("data", "axes fraction"), ha="center")
    axes.set(xlabel="predicted seconds", ylabel=unit, xlim=(0, begin or 1))
    if lower or any(m[3] for m in moments):
        axes.set_yscale("symlog", linthresh=max(plan.peak_bytes / scale, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
