"""Plans for people who read: a table of a plan, a table of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_plugin.plan_fields import BarePlan
from lightning_plugin.plan_parts import parts
from lightning_plugin.units import format_bytes, format_seconds

HEADINGS = ("segment", "mode", "forward", "backward", "stored", "on", "peak", "time", "recompute")
#: One more column, where parameters are streamed.
FETCHES = "fetches"


def rows(plan: BarePlan) -> list[tuple[str, ...]]:
    """One row of words for each segment and chain."""
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


def head(plan: BarePlan) -> str:
    """The image and the budget of a plan."""
    image = " for " + " x ".join(map(str, plan.shape)) if plan.shape else ""
    return f"Plan{image}" + (f" within {format_bytes(plan.budget)}" if plan.budget else "")


def cost(plan: BarePlan) -> str:
    """Memory, time and recomputation of a step."""
    expected = plan.forecast
    return (
        f"peak {format_bytes(expected.peak_bytes)} on the device; {format_seconds(expected.seconds)} a step; "
        f"{100 * expected.recompute:.0f} % recomputed"
    )


def summary(plan: BarePlan) -> str:
    """The plan in one line."""
    return f"{head(plan)}: {cost(plan)}"


def table(plan: BarePlan) -> str:
    """The plan as text: a line for each segment, and the sums."""
    expected = plan.forecast
    sums = (
        f"{cost(plan)}\n"
        f"plain PyTorch would hold {format_bytes(expected.plain_bytes)} for backward "
        f"({format_bytes(expected.plain_bytes - expected.index_bytes)} without pooling indices and masks)"
    )
    if expected.reserve_bytes:
        reserve = format_bytes(expected.reserve_bytes)
        sums += f"\n{reserve} of the peak are left to the workspaces of the device's libraries"
    lower = {tier: sum(s.forecast.stored_bytes for s in plan.segments if s.tier == tier) for tier in ("host", "disk")}
    spilled = [f"{format_bytes(size)} of maps on the {tier}" for tier, size in lower.items() if size]
    if spilled:
        sums += "\n" + " and ".join(spilled) + ", and as much again for their gradients"
    if expected.streamed_bytes:
        tiers = " and ".join(f"the {tier}" for tier, on in (("host", plan.on_host), ("disk", plan.on_disk)) if on)
        sums += (
            f"\n{format_bytes(expected.streamed_bytes)} of parameters live on {tiers}, with their gradients and "
            f"what an optimizer keeps; {format_bytes(expected.traffic_bytes)} travel in a step"
            + (", copies ahead of their use" if plan.fetched_ahead else "")
        )
    barriers = [f"run whole, for want of a tiling rule: {b}" for b in plan.barriers]
    headings = (*HEADINGS, FETCHES) if expected.streamed_bytes else HEADINGS
    approximate = [f"an approximation in training: {plan.approximation}"] if plan.approximation else []
    return "\n".join([head(plan), *columns(headings, rows(plan)), sums, *barriers, *approximate])


def columns(headings: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(r[i]) for r in [headings, *body]) for i in range(len(headings))]

    def line(cells: tuple[str, ...]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()

    return [line(headings), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, body)]


SWEEP_HEADINGS = ("budget", "peak", "time", "of plain", "recompute", "host", "disk", "segments", "")


def sweep_table(plans: Sequence[BarePlan], plain: BarePlan, asked: BarePlan | None) -> str:
    """A line for each budget; the last is what plain PyTorch needs."""
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
            *(format_bytes(stored) if (stored := stored_on(p, tier)) else "-" for tier in ("host", "disk")),
            str(len(p.segments) + len(p.chains)),
            "asked for" if p is asked else "plain PyTorch" if p is plain else "the smallest" if p is smallest else "",
        )
        for p in plans
    ]
    head = "Time against budget"
    if plain.shape:
        head += " for " + " x ".join(map(str, plain.shape))
    return "\n".join([head, *columns(SWEEP_HEADINGS, body)])


def stored_on(plan: BarePlan, tier: str) -> int:
    """The bytes of the maps that a plan stores on a tier."""
    return sum(s.forecast.stored_bytes for s in plan.segments if s.tier == tier and not s.keep)
