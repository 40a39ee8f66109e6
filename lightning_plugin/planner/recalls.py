"""Plans that read back what they have stored; see [Note: recall] in `program.recall`.

What is recalled changes no cut, no grid and no tier. So it is decided last, of a plan that the search has found:
wherever reading takes less than to make again. On the device that is memory while the segment is pulled back; where a
plan has no room for that, what lies below is recalled alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.search.predict import each
from lightning_plugin.program.program import programs
from lightning_plugin.program.recall import InBackward


def recalls(plan: Plan, network: Network, rates: Rates) -> Iterator[Plan]:
    """A plan that recalls wherever it is worth it, and one that does so below the device only; none where that is
    nowhere."""
    if not network.trains:
        return
    now = each(plan, network, rates)
    then = each(replace(plan, segments=tuple(map(recalling, plan.segments))), network, rates)
    faster = {i for i, (a, b) in enumerate(zip(now, then, strict=True)) if b < a}
    below = {i for i in faster if plan.segments[i].tier != "device"}
    for chosen in (faster, below) if below != faster else (faster,):
        if chosen:
            yield with_recall(plan, network, {i: then[i] - now[i] for i in chosen})


def recalling(segment: SegmentPlan) -> SegmentPlan:
    """A segment that recalls, if it may."""
    return replace(segment, recall=True) if segment.may_recall else segment


def with_recall(plan: Plan, network: Network, seconds: dict[int, float]) -> Plan:
    """A plan of which the segments at some places recall, and take so much longer."""
    segments, saved = list(plan.segments), work_saved(plan, network)
    for i, more in seconds.items():
        s = segments[i]
        figures = replace(s.forecast, seconds=s.forecast.seconds + more, recompute=s.forecast.recompute - saved[i][0])
        segments[i] = replace(s, recall=True, forecast=figures)
    forecast = replace(
        plan.forecast,
        seconds=plan.forecast.seconds + sum(seconds.values()),
        recompute=plan.forecast.recompute - sum(saved[i][1] for i in seconds),
    )
    return replace(plan, segments=tuple(segments), forecast=forecast)


def work_saved(plan: Plan, network: Network) -> list[tuple[float, float]]:
    """What each segment's backward does not compute again if it recalls: as a share of its work and of all."""
    found = []
    work = {n.serial: network.profiles[n.serial].work for n in network.order}
    for _, _, program in programs(plan, network.nodes):
        saved = plain = 0
        if program is not None:
            saved = sum(work[v.node.serial] for v in InBackward.of(program).maps if v.node is not None)
            plain = sum(work[n.serial] for n in program.steps)
        found.append((saved / max(1, plain), saved / max(1, sum(work.values()))))
    return found
