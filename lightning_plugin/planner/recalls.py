"""Plans that read stored maps back in backward; see [Note: recall] in `program.program`.

Reading back changes no cut, no grid and no tier. So it is decided last, for a plan that the search has found: wherever
reading takes less time than recomputing. A map on the device is read back into more memory while its segment is pulled
back; if there is no room for that, only maps on lower tiers are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.search.predict import each
from lightning_plugin.program.program import InBackward, programs


def recalls(plan: Plan, network: Network, rates: Rates) -> Iterator[Plan]:
    """A plan that reads back wherever it saves time, and one that does so on lower tiers only; none if it never
    does."""
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
    """A segment that reads back, if it may."""
    return replace(segment, recall=True) if segment.may_recall else segment


def with_recall(plan: Plan, network: Network, seconds: dict[int, float]) -> Plan:
    """A plan whose segments at some places read back, and take so many seconds more."""
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
    """Work that each segment's backward does not recompute if it reads back: as a share of its work and of all work."""
    found = []
    work = {n.serial: network.profiles[n.serial].work for n in network.order}
    for _, _, program in programs(plan, network.nodes):
        saved = plain = 0
        if program is not None:
            saved = sum(work[v.node.serial] for v in InBackward.of(program).maps if v.node is not None)
            plain = sum(work[n.serial] for n in program.steps)
        found.append((saved / max(1, plain), saved / max(1, sum(work.values()))))
    return found
