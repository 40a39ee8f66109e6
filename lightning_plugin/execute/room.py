"""Room for a backward that begins while more is held than was planned.

[Note: order] Plans assume that backward runs in the reverse order of forward, so that the memory of later calls is free
when an earlier one is pulled back. A loss that is pulled back before later ones finds less room. Then its tiles are
made smaller until they fit; a segment's grid changes no result. If that is not possible, an error ends the step before
it exceeds its budget. A graph that is retained for another pass needs more room than planned too, since backward frees
nothing on its way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor

from lightning_plugin.boxes import Grid
from lightning_plugin.errors import BudgetError
from lightning_plugin.execute.frame import Step
from lightning_plugin.execute.gradients import sum_dtype
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.tile_pass import extreme_tiles
from lightning_plugin.graph import Node, Value
from lightning_plugin.ledger import Ledger
from lightning_plugin.memory import budget_for
from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.plan import SegmentPlan
from lightning_plugin.private import current_pass, retains_graph
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.units import ceil_mib, format_bytes

#: Factor on the estimated bytes of a smaller tile, which were not rehearsed as the planned tile's were.
MARGIN = 1.1


def make_room(run: SegmentRun, read: Sequence[Boundary], leaves: Iterable[Tensor]) -> None:
    """Choose smaller tiles for backward if the planned ones do not fit beside the memory that is held.

    Args:
        run: The segment.
        read: The boundaries that it reads.
        leaves: The tensors that collect its gradients.
    """
    ledger, needs = run.ledger, backward_bytes(run.plan)
    if ledger is None or ledger.limit is None or not needs:
        return
    room = ledger.limit - ledger.held - ledger.pending_sums.next_bytes(leaves)
    if needs <= room:
        return
    if not run.scans:
        planned = run.plan.backward  # an earlier pass may have chosen smaller tiles
        largest, before = largest_tile_bytes(run, planned), gradient_bytes(run, read, planned)
        for grid in finer_grids(run, planned):
            fixed = gradient_bytes(run, read, grid) + (largest_io_bytes(run, grid) if planned.tiles == 1 else 0)
            part = largest_tile_bytes(run, grid) / max(1, largest)
            if fixed + MARGIN * part * max(0, needs - before) <= room:
                run.backward_grid = grid
                return
    raise budget_error(run.plan.path, needs, ledger)


def gradient_bytes(run: SegmentRun, read: Sequence[Boundary], grid: Grid) -> int:
    """Return the bytes of the gradients that backward holds whole for any grid; with several tiles, those of vectors
    twice, since each tile makes its own before it is added."""
    added = [v for v in run.program.vectors if v.requires_grad]
    wholes = [v for v in (*run.spreads, *run.images) if v.requires_grad]
    made = [h.cotangent for h in read if h.home.tier == "device" and not h.cotangent.is_started]
    sizes = [(math.prod(v.shape), sum_dtype(v.dtype, v.device, grid.tiles)) for v in added]
    sizes += [(math.prod(v.shape), v.dtype) for v in added] if grid.tiles > 1 else []
    sizes += [(math.prod(v.shape), accumulation_dtype(v.dtype)) for v in wholes]
    sizes += [(math.prod(c.layout.shape), accumulation_dtype(c.dtype)) for c in made]
    return sum(count * dtype.itemsize for count, dtype in sizes)


class Guard:
    """Refuses the backward of a kept segment if there is no room for it, since kept segments have no smaller tiles.

    It checks when a backward pass reaches the segment: later, part of the memory is allocated already. It checks again
    if some ``ends`` of the segment (nodes whose results none of its nodes reads) are not in the pass: saved tensors
    that only these need are not freed on the way. Autograd runs the nodes computed last first, so an end that was not
    reached before an earlier node is not in the pass.

    Attributes:
        leaves: The tensors that collect the segment's gradients.
        readers: For each node, the nodes that read its results.
        ends: The ends that require grad.
        values: The bytes of each value of each node.
        checked_pass: The last pass that was checked.
        missing: The ends that this pass has not reached.
        held: Bytes held when this pass reached the segment.
        step: The step. The ledger counts a call as long as its step is alive, and autograd's graph holds the guard.
    """

    def __init__(self, plan: SegmentPlan, nodes: Sequence[Node], step: Step) -> None:
        self.plan, self.ledger, self.step = plan, step.ledger, step
        self.leaves: list[Tensor] = []
        self.readers = readers(nodes)
        self.ends = {i for i, n in enumerate(nodes) if not self.readers[i] and any(v.requires_grad for v in n.outputs)}
        self.values = [{v: v.bytes for v in (*n.maps, *n.outputs)} for n in nodes]
        self.checked_pass = -1
        self.missing: set[int] = set()
        self.held = 0

    @property
    def is_needed(self) -> bool:
        return self.ledger is not None and self.ledger.limit is not None and bool(self.plan.forecast.backward_needs)

    def __call__(self, gradient: Tensor, place: int) -> None:
        """Check the room when a pass reaches the node at ``place``."""
        ledger = self.ledger
        assert ledger is not None and ledger.limit is not None
        needs = backward_bytes(self.plan)
        if self.checked_pass != current_pass():
            self.checked_pass = current_pass()
            self.missing = set(self.ends)
            self.held = ledger.held + ledger.pending_sums.next_bytes(self.leaves)
        elif not self.missing:
            return
        self.missing.discard(place)
        late = {end for end in self.missing if end > place}
        self.missing -= late
        needs = min(self.plan.forecast.retained_needs, needs + self.bytes_only_for(late))
        if self.held + needs > ledger.limit:
            raise budget_error(self.plan.path, self.held + needs - ledger.held, ledger)

    def bytes_only_for(self, ends: Collection[int]) -> int:
        """Return the bytes of all values that only these ends need."""
        only = set(ends)
        for i in reversed(range(len(self.readers))):
            if self.readers[i] and self.readers[i] <= only:
                only.add(i)
        found: dict[Value, int] = {}
        for i in only:
            found |= self.values[i]
        return sum(found.values())


def readers(nodes: Sequence[Node]) -> list[set[int]]:
    """Return for each node the nodes among these that read its results."""
    made = {v: i for i, n in enumerate(nodes) for v in n.outputs}
    found: list[set[int]] = [set() for _ in nodes]
    for i, n in enumerate(nodes):
        for v in n.inputs:
            if v in made:
                found[made[v]].add(i)
    return found


def leaf_tensors(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of autograd that require grad."""
    return [t for t in inputs if t.is_leaf and t.requires_grad]


def backward_bytes(plan: SegmentPlan) -> int:
    """Return the bytes that a segment's backward needs in the current pass."""
    return plan.forecast.retained_needs if retains_graph() else plan.forecast.backward_needs


def budget_error(path: str, needs: int, ledger: Ledger) -> BudgetError:
    smallest = budget_for(max(ledger.held + needs, ledger.bytes_to_keep_all()))
    return BudgetError(
        f"the backward of '{path}' needs {format_bytes(needs)} beside the {format_bytes(ledger.held)} that the "
        f"step holds, more than the budget of {format_bytes(ledger.limit or 0)}: other calls hold more than was "
        "planned for, or leave gradients of their images. Pull back each call's loss before the next call, or say how "
        f"many calls wait for one backward: TiledModule(..., calls={max(2, len(ledger.calls))}) plans them together, "
        f"within {ceil_mib(budget_for(ledger.bytes_to_plan_together()))}. Without that, give at least "
        f"{ceil_mib(smallest)}.",
        smallest,
        path,
    )


def largest_tile_bytes(run: SegmentRun, grid: Grid) -> float:
    """Return the bytes of all maps of the largest tile."""
    maps = dict.fromkeys(v for n in run.program.nodes for v in (*n.maps, *n.outputs) if v.is_map)
    return max_tile_bytes(run, grid, list(maps))


def largest_io_bytes(run: SegmentRun, grid: Grid) -> float:
    """Return the most bytes of a tile's parts of boundaries and cotangents. Operators copy them if they are not
    contiguous, as parts of whole maps are not."""
    given = [t.stored for t in run.program.targets if t.stored is not None]
    return max_tile_bytes(run, grid, [*run.program.reads, *given])


def max_tile_bytes(run: SegmentRun, grid: Grid, maps: Sequence[Value]) -> float:
    """Return the most bytes that a tile has of some maps."""
    each = [(v, v.bytes / max(1, math.prod(v.space.extent))) for v in maps]
    tiles = [need for need, _ in extreme_tiles(run.program, grid)]
    return max(sum(size * need[key].positions for key, size in each if key in need) for need in tiles)


def finer_grids(run: SegmentRun, grid: Grid) -> Iterator[Grid]:
    """Iterate over grids of smaller and smaller tiles, each halved along the axis that makes them smallest. Cuts along
    some axes of attention make no tile smaller."""
    longest = [max(sizes) for sizes in zip(*run.program.extents, strict=True)]
    while True:
        cuts = [halve_tiles(grid, axis, size) for axis, size in enumerate(longest) if grid.counts[axis] < size]
        cuts = [c for c in cuts if c != grid]
        if not cuts:
            return
        grid = min(cuts, key=lambda g: largest_tile_bytes(run, g))
        yield grid


def halve_tiles(grid: Grid, axis: int, size: int) -> Grid:
    """Return a grid with twice as many tiles along an axis; with half their side, if sides are given."""
    count, sides = min(2 * grid.counts[axis], size), grid.sides
    if sides:
        sides = (*sides[:axis], -(-sides[axis] // 2), *sides[axis + 1 :])
        count = grid.counts[axis] if sides == grid.sides else count
    return Grid((*grid.counts[:axis], count, *grid.counts[axis + 1 :]), sides)
