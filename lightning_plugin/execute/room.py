"""Room for a backward that comes when more is held than its plan knew.

[Note: order] A plan counts on backward running in the reverse order of forward: what later calls of a step hold is gone
when an earlier one is pulled back. A loss that is pulled back before them finds less room. Then its tiles are made
smaller, as far as it takes; what a segment's grid is changes no result. Where that is not possible, the step ends with
an error before it breaks its budget. The same holds of a graph that is retained for another pass: nothing that backward
has used is let go on the way, and it needs more room than planned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from lightning_plugin.boxes import Grid
from lightning_plugin.errors import BudgetError
from lightning_plugin.execute.frame import Step
from lightning_plugin.execute.gradients import type_of_sum
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.tile_pass import outline
from lightning_plugin.graph import Node, Value
from lightning_plugin.ledger import Ledger
from lightning_plugin.memory import budget_for
from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.plan import SegmentPlan
from lightning_plugin.private import current_pass, retains_graph
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.units import ceil_mib, format_bytes

#: A smaller tile's need is not known as well as that of the planned one.
MARGIN = 1.1


def make_room(run: SegmentRun, read: Sequence[Boundary], leaves: Sequence[Tensor]) -> None:
    """Choose smaller tiles for backward where those that were planned do not fit beside what is held; ``read``
    are the boundaries that the segment reads, ``leaves`` the tensors that collect its gradients."""
    ledger, needs = run.ledger, needed(run.plan)
    if ledger is None or ledger.limit is None or not needs:
        return
    room = ledger.limit - ledger.held - ledger.sums.coming(leaves)
    if needs <= room:
        return
    if not run.scans:
        planned = run.plan.backward  # a pass before this one may have had to make its tiles smaller
        largest, before = largest_tile(run, planned), gradients(run, read, planned)
        for grid in finer(run, planned):
            fixed = gradients(run, read, grid) + (largest_parts(run, grid) if planned.tiles == 1 else 0)
            part = largest_tile(run, grid) / max(1, largest)
            if fixed + MARGIN * part * max(0, needs - before) <= room:
                run.backward_grid = grid
                return
    raise no_room(run.plan.path, needs, ledger)


def gradients(run: SegmentRun, read: Sequence[Boundary], grid: Grid) -> int:
    """The bytes of the gradients that backward makes whole, whatever its tiles are; of vectors, each of several tiles
    makes its own before they are added up."""
    added = [v for v in run.program.vectors if v.requires_grad]
    wholes = [v for v in (*run.spreads, *run.images) if v.requires_grad]
    made = [h.cotangent for h in read if h.home.tier == "device" and not h.cotangent.is_started]
    sizes = [(math.prod(v.shape), type_of_sum(v.dtype, v.device, grid.tiles)) for v in added]
    sizes += [(math.prod(v.shape), v.dtype) for v in added] if grid.tiles > 1 else []
    sizes += [(math.prod(v.shape), accumulation_dtype(v.dtype)) for v in wholes]
    sizes += [(math.prod(c.layout.shape), accumulation_dtype(c.dtype)) for c in made]
    return sum(count * dtype.itemsize for count, dtype in sizes)


class Guard:
    """Refuses to pull back a kept segment, whose tiles cannot be made smaller, where there is no room for it.

    It looks when a pass first comes to the segment: later, part of what backward needs is there already. And it looks
    again where some of the segment's ``ends``, the results that none of its nodes reads, have no part in the pass: what
    only they need is not let go on the way. Autograd comes to what was computed last first, so an end that has not been
    come to by the time of an earlier node is not in the pass.
    """

    def __init__(self, plan: SegmentPlan, nodes: Sequence[Node], step: Step) -> None:
        self.plan, self.step, self.ledger = plan, step, step.ledger
        self.leaves: list[Tensor] = []
        self.readers = readers(nodes)
        self.ends = {i for i, n in enumerate(nodes) if not self.readers[i] and any(v.requires_grad for v in n.outputs)}
        #: The values of each node, with their bytes.
        self.values = [{v: v.bytes for v in (*n.maps, *n.outputs)} for n in nodes]
        self.looked_in = -1
        self.missing: set[int] = set()
        self.held = 0

    @property
    def looks(self) -> bool:
        return self.ledger is not None and self.ledger.limit is not None and bool(self.plan.forecast.backward_needs)

    def __call__(self, gradient: Tensor, place: int) -> None:
        """The pass comes to the segment's node at a place."""
        ledger = self.ledger
        assert ledger is not None and ledger.limit is not None
        needs = needed(self.plan)
        if self.looked_in != current_pass():
            self.looked_in = current_pass()
            self.missing = set(self.ends)
            self.held = ledger.held + ledger.sums.coming(self.leaves)
        elif not self.missing:
            return
        self.missing.discard(place)
        late = {end for end in self.missing if end > place}
        self.missing -= late
        needs = min(self.plan.forecast.retained_needs, needs + self.staying(late))
        if self.held + needs > ledger.limit:
            raise no_room(self.plan.path, self.held + needs - ledger.held, ledger)

    def staying(self, ends: Collection[int]) -> int:
        """The bytes of what only these ends need."""
        only = set(ends)
        for i in reversed(range(len(self.readers))):
            if self.readers[i] and self.readers[i] <= only:
                only.add(i)
        found: dict[Value, int] = {}
        for i in only:
            found |= self.values[i]
        return sum(found.values())


def readers(nodes: Sequence[Node]) -> list[set[int]]:
    """For each of some nodes, those among them that read its results."""
    made = {v: i for i, n in enumerate(nodes) for v in n.outputs}
    found: list[set[int]] = [set() for _ in nodes]
    for i, n in enumerate(nodes):
        for v in n.inputs:
            if v in made:
                found[made[v]].add(i)
    return found


def leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose gradients autograd collects for the user."""
    return [t for t in inputs if t.is_leaf and t.requires_grad]


def needed(plan: SegmentPlan) -> int:
    """Bytes that a segment's backward needs in the pass under way."""
    return plan.forecast.retained_needs if retains_graph() else plan.forecast.backward_needs


def no_room(path: str, needs: int, ledger: Ledger) -> BudgetError:
    smallest = budget_for(max(ledger.held + needs, ledger.whole_step()))
    return BudgetError(
        f"the backward of '{path}' needs {format_bytes(needs)} beside the {format_bytes(ledger.held)} that the "
        f"step holds, more than the budget of {format_bytes(ledger.limit or 0)}: other calls hold more than was "
        "planned for, or leave gradients of their images. Pull back each call's loss before the next call, or say how "
        f"many calls wait for one backward (TiledModule(..., calls={max(2, len(ledger.calls))})): they are planned "
        "together, and the smallest budget for all is known before the first. "
        f"Without that, give at least {ceil_mib(smallest)}.",
        smallest,
        path,
    )


def largest_tile(run: SegmentRun, grid: Grid) -> float:
    """The bytes of all maps of the largest tile."""
    maps = dict.fromkeys(v for n in run.program.steps for v in (*n.maps, *n.outputs) if v.is_map)
    return largest_of(run, grid, list(maps))


def largest_parts(run: SegmentRun, grid: Grid) -> float:
    """The bytes of the parts of whole maps that a tile reads or is given the cotangent of: where they do not lie in one
    piece, operators copy them first. A single tile has the whole maps, which do."""
    given = [t.stored for t in run.program.targets if t.stored is not None]
    return largest_of(run, grid, [*run.program.reads, *given])


def largest_of(run: SegmentRun, grid: Grid, maps: Sequence[Value]) -> float:
    """The most bytes that a tile has of some maps."""
    each = [(v, v.bytes / max(1, math.prod(v.space.extent))) for v in maps]
    tiles = [need for need, _ in outline(run.program, grid)]
    return max(sum(size * need[key].positions for key, size in each if key in need) for need in tiles)


def finer(run: SegmentRun, grid: Grid) -> Iterator[Grid]:
    """Grids of smaller and smaller tiles, each cut where that makes them smallest: along some axes of attention, tiles
    are all as large."""
    longest = [max(sizes) for sizes in zip(*run.program.extents, strict=True)]
    while True:
        cuts = [cut(grid, axis, size) for axis, size in enumerate(longest) if grid.counts[axis] < size]
        cuts = [c for c in cuts if c != grid]
        if not cuts:
            return
        grid = min(cuts, key=lambda g: largest_tile(run, g))
        yield grid


def cut(grid: Grid, axis: int, size: int) -> Grid:
    """A grid of twice as many tiles on an axis: where their sides are given, of half the side."""
    count, sides = min(2 * grid.counts[axis], size), grid.sides
    if sides:
        sides = (*sides[:axis], -(-sides[axis] // 2), *sides[axis + 1 :])
        count = grid.counts[axis] if sides == grid.sides else count
    return Grid((*grid.counts[:axis], count, *grid.counts[axis + 1 :]), sides)
