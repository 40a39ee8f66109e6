"""Choosing a plan without a budget: fixed grids, and a map stored wherever a statistic would make it be recomputed.

The *stage* of a value is how many segments have to be finished before it can be computed: a reduction's result is one
stage after the map it reduces. A map that is needed in a later stage than its own is stored there and then; so is the
result of an operator that shrinks its map, because it is small and what comes after it has a halo to start from.

[Note: entire] What every tile reads all of (`Entire`: keys and values of one image) is to be stored, as a map that is
made whole is: its reader is a stage later. It is only another name for what is stored, and belongs to its reader's
stage, however late that is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import Barrier, Gather, ReduceOp, Source, Spread, TileOp
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.program.program import programs
from lightning_plugin.program.scan import shareable
from lightning_plugin.rules.uncut import Entire


def stages(nodes: Sequence[Node], stored: set[Value]) -> dict[Value, int]:
    """The stage of every value, with ``stored`` (ids of maps) read back by window operators one stage later."""
    stage: dict[Value, int] = {}
    for node in nodes:
        here = 0
        for v in node.inputs:
            cut = v in stored and node.op.kind in ("window", "resample")
            here = max(here, stage.get(v, 0) + cut)
        for v in node.inputs:
            if is_entire(v):
                stage[v] = here
        after = isinstance(node.op, (ReduceOp, Gather, Entire))
        for v in node.outputs:
            stage[v] = here + after
    return stage


def crossing(nodes: Sequence[Node], stage: dict[Value, int]) -> set[Value]:
    """Maps that an operator of a later stage needs."""
    found: set[Value] = set()
    for node in nodes:
        here = max((stage.get(v, 0) for v in node.outputs), default=0) - isinstance(node.op, ReduceOp)
        for v in node.inputs:
            if v.is_map and stored_kind(v) and (stage.get(v, 0) < here or isinstance(node.op, Gather)):
                found.add(v)
    return found


def is_entire(v: Value) -> bool:
    return v.node is not None and isinstance(v.node.op, Entire)


def stored_kind(v: Value) -> bool:
    """Sources and spread vectors lie somewhere already."""
    return v.node is not None and not isinstance(v.node.op, (Source, Spread))


def shrinking(nodes: Sequence[Node]) -> set[Value]:
    found: set[Value] = set()
    for node in nodes:
        if node.op.kind in ("window", "resample") and node.maps and node.outputs[0].is_map:
            before, after = node.maps[0].space.extent, node.outputs[0].space.extent
            if all(a * 2 <= b + 2 for a, b in zip(after, before, strict=True)):
                found.add(node.outputs[0])
    return found


def fixed(
    nodes: Sequence[Node],
    grid: Grid | None,
    backward: Grid | None = None,
    halo: str = "recompute",
    alike: bool = False,
) -> Plan:
    """Segments by stage, all on the same grid (one tile where ``grid`` is None); ``alike``: tiles may be identical.

    With ``halo="share"`` every segment whose operators keep the order of rows hands them on.
    """
    stored = shrinking(nodes)
    while True:
        stage = stages(nodes, stored)
        more = stored | crossing(nodes, stage)
        if more == stored:
            break
        stored = more
    barriers = tuple(n.label for n in nodes if isinstance(n.op, Barrier))
    plan = replace(by_stage(nodes, stored, stage, grid, backward, alike), barriers=barriers)
    return sharing(plan, nodes) if halo == "share" else plan


def sharing(plan: Plan, nodes: Sequence[Node]) -> Plan:
    """A plan whose tiled segments share halos where they can."""
    segments = []
    for segment, _, program in programs(plan, nodes):
        if program is not None and shareable(program, segment.forward):
            segment = replace(segment, backward=segment.forward, halo="share", alike=False)
        segments.append(segment)
    return replace(plan, segments=tuple(segments))


def by_stage(
    nodes: Sequence[Node],
    stored: set[Value],
    stage: dict[Value, int],
    grid: Grid | None,
    backward: Grid | None,
    alike: bool = False,
) -> Plan:
    groups: dict[int, list[int]] = defaultdict(list)
    axes: dict[int, int] = {}
    inner = spatial_axes(nodes)
    for place, node in enumerate(nodes):
        if isinstance(node.op, ReduceOp):
            when, space = stage[node.outputs[0]] - 1, node.maps[0].space
        elif node.outputs and node.outputs[0] in stored:
            when, space = stage[node.outputs[0]], node.outputs[0].space
        else:
            continue
        groups[when].append(place)
        axes[when] = max(axes.get(when, 0), len(space.extent))
    segments = []
    alike |= any(isinstance(n.op, Source) and n.op.lies == "elsewhere" for n in nodes)  # which may know of background
    for when in sorted(groups):
        forward = fit(grid, axes[when], inner)
        back = fit(backward, axes[when], inner) if backward else forward
        segments.append(SegmentPlan(tuple(groups[when]), forward, back, alike=alike))
    return Plan(tuple(segments))


def kept_segments(nodes: Sequence[Node]) -> tuple[SegmentPlan, ...]:
    """One segment in which all runs whole, as plain PyTorch runs it; none where there is no map."""
    places = [i for i, n in enumerate(nodes) if isinstance(n.op, (TileOp, ReduceOp))]
    if not places:
        return ()
    grid = Grid((1,) * len(nodes[places[0]].maps[0].space.extent))
    return (SegmentPlan(tuple(places), grid, grid, keep=True),)


def spatial_axes(nodes: Sequence[Node]) -> int | None:
    """Number of axes that are space; those after them count images. None where no image says so."""
    images = ((n.outputs[0].space.extent, n.op.instances) for n in nodes if isinstance(n.op, Source))
    return min((len(extent) - instances for extent, instances in images), default=None)


def fit(grid: Grid | None, axes: int, space: int | None = None) -> Grid:
    """A grid for a number of axes: given for fewer, it repeats its last count in space and cuts nothing else."""
    if grid is None:
        return Grid((1,) * axes)
    space = axes if space is None else space
    counts = (*grid.counts, *(grid.counts[-1:] * max(0, space - len(grid.counts))), *(1,) * axes)
    return Grid(counts[:axes])
