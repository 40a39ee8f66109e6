"""Plans without a budget: fixed grids, and stored maps where recomputation would be needed otherwise.

The *stage* of a value is the number of segments that have to be finished before it can be computed: a reduction's
result is one stage after the map that it reduces. A map that is read in a later stage than its own is stored. So is the
result of an operator that halves its map or shrinks it further: it is small, and the halo of later windows ends there.

[Note: entire] A map that every tile reads whole (`Entire`: keys and values of one image) is stored, so its reader is a
stage later. The result of `Entire` is the same stored map, and belongs to the stage of its reader.
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
from lightning_plugin.program.scan import can_share_halos
from lightning_plugin.rules.uncut import Entire


def stages(nodes: Sequence[Node], stored: set[Value]) -> dict[Value, int]:
    """Return the stage of every value; window operators read ``stored`` maps one stage later."""
    stage: dict[Value, int] = {}
    for node in nodes:
        own = 0
        for v in node.inputs:
            is_cut = v in stored and node.op.kind in ("window", "resample")
            own = max(own, stage.get(v, 0) + is_cut)
        for v in node.inputs:
            if is_entire(v):
                stage[v] = own
        ends_stage = isinstance(node.op, (ReduceOp, Gather, Entire))
        for v in node.outputs:
            stage[v] = own + ends_stage
    return stage


def maps_read_later(nodes: Sequence[Node], stage: dict[Value, int]) -> set[Value]:
    """Return the maps that an operator of a later stage reads."""
    found: set[Value] = set()
    for node in nodes:
        own = max((stage.get(v, 0) for v in node.outputs), default=0) - isinstance(node.op, ReduceOp)
        for v in node.inputs:
            if v.is_map and can_be_stored(v) and (stage.get(v, 0) < own or isinstance(node.op, Gather)):
                found.add(v)
    return found


def is_entire(v: Value) -> bool:
    return v.node is not None and isinstance(v.node.op, Entire)


def can_be_stored(v: Value) -> bool:
    """True for a map that is made, not read from a source or sliced from a vector."""
    return v.node is not None and not isinstance(v.node.op, (Source, Spread))


def shrunk_maps(nodes: Sequence[Node]) -> set[Value]:
    """Return the results of windows and resampling that have at most half the extent on each axis."""
    found: set[Value] = set()
    for node in nodes:
        if node.op.kind in ("window", "resample") and node.maps and node.outputs[0].is_map:
            before, after = node.maps[0].space.extent, node.outputs[0].space.extent
            if all(a * 2 <= b + 2 for a, b in zip(after, before, strict=True)):
                found.add(node.outputs[0])
    return found


def fixed_plan(
    nodes: Sequence[Node],
    grid: Grid | None,
    backward: Grid | None = None,
    halo: str = "recompute",
    alike: bool = False,
) -> Plan:
    """Make one segment for each stage, all on the same grid.

    Args:
        nodes: The nodes of a recording.
        grid: The grid of forward; None is one tile.
        backward: The grid of backward; by default that of forward.
        halo: ``"share"`` makes scans of all segments whose operators keep the order of rows.
        alike: Tiles may be identical; see [Note: identical tiles] in `execute.tile_pass`.
    """
    stored = shrunk_maps(nodes)
    while True:
        stage = stages(nodes, stored)
        more = stored | maps_read_later(nodes, stage)
        if more == stored:
            break
        stored = more
    barriers = tuple(n.label for n in nodes if isinstance(n.op, Barrier))
    plan = replace(plan_of_stages(nodes, stored, stage, grid, backward, alike), barriers=barriers)
    return share_halos(plan, nodes) if halo == "share" else plan


def share_halos(plan: Plan, nodes: Sequence[Node]) -> Plan:
    """Make scans of all tiled segments that can share halos."""
    segments = []
    for segment, _, program in programs(plan, nodes):
        if program is not None and can_share_halos(program, segment.forward):
            segment = replace(segment, backward=segment.forward, halo="share", alike=False)
        segments.append(segment)
    return replace(plan, segments=tuple(segments))


def plan_of_stages(
    nodes: Sequence[Node],
    stored: set[Value],
    stage: dict[Value, int],
    grid: Grid | None,
    backward: Grid | None,
    alike: bool = False,
) -> Plan:
    """Make one segment of the reductions and stored maps of each stage."""
    targets: dict[int, list[int]] = defaultdict(list)
    axes: dict[int, int] = {}
    spatial = spatial_axes(nodes)
    for place, node in enumerate(nodes):
        if isinstance(node.op, ReduceOp):
            own, layout = stage[node.outputs[0]] - 1, node.maps[0].space
        elif node.outputs and node.outputs[0] in stored:
            own, layout = stage[node.outputs[0]], node.outputs[0].space
        else:
            continue
        targets[own].append(place)
        axes[own] = max(axes.get(own, 0), len(layout.extent))
    segments = []
    alike |= any(isinstance(n.op, Source) and n.op.location == "elsewhere" for n in nodes)  # it may know its background
    for own in sorted(targets):
        forward = fit_grid(grid, axes[own], spatial)
        back = fit_grid(backward, axes[own], spatial) if backward else forward
        segments.append(SegmentPlan(tuple(targets[own]), forward, back, alike=alike))
    return Plan(tuple(segments))


def kept_segments(nodes: Sequence[Node]) -> tuple[SegmentPlan, ...]:
    """Return one kept segment, which runs as in plain PyTorch; none if there is no map."""
    places = [i for i, n in enumerate(nodes) if isinstance(n.op, (TileOp, ReduceOp))]
    if not places:
        return ()
    grid = Grid((1,) * len(nodes[places[0]].maps[0].space.extent))
    return (SegmentPlan(tuple(places), grid, grid, keep=True),)


def spatial_axes(nodes: Sequence[Node]) -> int | None:
    """Return the number of spatial axes, which come before those of images; None without images."""
    images = ((n.outputs[0].space.extent, n.op.instances) for n in nodes if isinstance(n.op, Source))
    return min((len(extent) - instances for extent, instances in images), default=None)


def fit_grid(grid: Grid | None, axes: int, space: int | None = None) -> Grid:
    """Extend a grid to a number of axes: its last count is repeated on spatial axes, other axes are uncut."""
    if grid is None:
        return Grid((1,) * axes)
    space = axes if space is None else space
    counts = (*grid.counts, *(grid.counts[-1:] * max(0, space - len(grid.counts))), *(1,) * axes)
    return Grid(counts[:axes])
