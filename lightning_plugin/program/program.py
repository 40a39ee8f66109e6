"""Programs of segments: the nodes that a tile evaluates, their order, and their boxes.

[Note: parts] Two networks, or two heads on a frozen trunk, may share a segment, and with it reading and the trunk. For
autograd they are independent: their losses are differentiated one after the other, in any order, or one of them never.
So a segment has one `autograd.Function` for each group of targets that are connected by values that require grad;
each recomputes its own tiles in backward. Forward runs once for all. Targets that read the same boundary are connected
too, so that the boundary's producer is differentiated once.

[Note: recall] The derivative of a statistic needs the values of its map. For a BatchNorm in train mode, backward would
therefore recompute the convolution before it, although the result is stored. A segment that *recalls* reads the stored
map instead. The contribution of its reductions to the cotangent of the map is computed tile by tile from the stored
values. The reductions are then no targets of the backward program, and the result of the convolution is unread, so that
it is not computed (see [Note: unread] in `rules.unread`).

A map can be recalled if its operator has gradients without its result, if reductions alone read it within the segment,
and if each of these reads this map only, needs no gradient of a vector, and does not compare values for equality. The
segment leases recalled maps as a reader does, so that they last until its own backward, which comes after that of all
readers. This takes memory on the device or a read from a lower tier; the plan says which segments recall. Of identical
tiles ([Note: identical tiles] in `execute.tile_pass`) one is read for all. Maps that are stored in bfloat16, since
these are not the computed values, dropped maps and results of scans, whose rows are made in another order, are not
recalled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from lightning_plugin.boxes import Box, Grid, reference_of
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp, Reduction, Source, Spread, TileOp
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.program.key import HashedKey, Unkeyed, structural_key, value_key


@dataclass(frozen=True, eq=False)
class Target:
    """Result of a segment: a stored map, or the vectors of a reduce node (``stored`` is None)."""

    node: Node
    stored: Value | None = None

    @property
    def map(self) -> Value:
        """The map whose positions the target's tiles partition."""
        return self.stored if self.stored is not None else self.node.maps[0]

    @property
    def op(self) -> ReduceOp:
        """The operator of a reduction."""
        assert isinstance(self.node.op, ReduceOp)
        return self.node.op

    def contribution(self, boxes: Sequence[Box], tiles: Sequence[Tensor], vectors: Mapping[Value, Tensor]) -> Reduction:
        """Return the contribution of identical tiles, of which the first was computed, to a reduction."""
        return self.op.contribution(boxes, tiles, self.operands(vectors))

    def finish(self, total: Reduction, vectors: Mapping[Value, Tensor]) -> tuple[Tensor, ...]:
        """Return the results of a reduction."""
        return self.op.finish(total, self.operands(vectors))

    def operands(self, vectors: Mapping[Value, Tensor]) -> list[Tensor]:
        return [vectors[v] for v in self.node.vectors]

    @property
    def requires_grad(self) -> bool:
        return self.stored.requires_grad if self.stored is not None else any(v.requires_grad for v in self.node.outputs)


@dataclass(frozen=True, eq=False)
class Program:
    """Part of the graph from stored maps to a segment's targets.

    Attributes:
        targets: The results.
        nodes: The nodes in the order of recording.
        reads: Maps that are read: stored maps, images, spread vectors.
        vectors: Vectors that are read.
        last_use: Index of the last node that reads a map.
        in_place: Serial numbers of nodes that run in place.
        reference: Extent of the segment's smallest map. A grid cuts this map evenly, and the targets' maps in
            proportion, also in a program of some of the targets.
    """

    targets: tuple[Target, ...]
    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    vectors: tuple[Value, ...]
    last_use: Mapping[Value, int] = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()
    reference: tuple[int, ...] = ()

    @staticmethod
    def build(
        targets: Sequence[Target],
        available: Callable[[Value], bool],
        reference: tuple[int, ...] = (),
        producers: Mapping[Value, Node] | None = None,
    ) -> Program:
        """Collect the nodes between available maps, images and spread vectors, and the targets.

        A value's present node is followed, or that among ``producers``.
        """
        nodes: dict[int, Node] = {}
        reads: dict[Value, None] = {}
        vectors: dict[Value, None] = {}
        for t in targets:
            if t.stored is not None and available(t.stored):
                raise ValueError(f"{t.stored.label} is stored twice")
        stack = [t.node for t in targets]
        while stack:
            node = stack.pop()
            if node.serial in nodes:
                continue
            nodes[node.serial] = node
            for v in node.inputs:
                if not v.is_map:
                    vectors.setdefault(v)
                    continue
                producer = v.node if producers is None else producers.get(v)
                if available(v) or producer is None or isinstance(producer.op, (Source, Spread)):
                    reads.setdefault(v)
                else:
                    stack.append(producer)
        order = tuple(nodes[s] for s in sorted(nodes))
        last = {v: i for i, node in enumerate(order) for v in node.inputs if v.is_map}
        in_place = frozenset(n.serial for n in order if can_run_in_place(n, order, targets, reads))
        reference = reference or reference_of([t.map.space.extent for t in targets])
        return Program(tuple(targets), order, tuple(reads), tuple(vectors), last, in_place, reference)

    @cached_property
    def map_slots(self) -> Mapping[Value, int]:
        """Index of every map: first those that are read, then those that are made."""
        made = (v for node in self.nodes for v in node.outputs if v.is_map)
        return {v: i for i, v in enumerate((*self.reads, *made))}

    @cached_property
    def unread(self) -> frozenset[int]:
        """Serial numbers of nodes whose stored results no node of the program reads: backward needs their gradients and
        not their results. See [Note: unread] in `rules.unread`."""
        stored = [(t.node, t.stored) for t in self.targets if t.stored is not None]
        return frozenset(n.serial for n, v in stored if v.requires_grad and v not in self.last_use)

    def differentiated(self, targets: Sequence[Target]) -> set[Value]:
        """Return the maps and vectors that the gradients of some targets reach: in plain PyTorch each of them gets a
        gradient, if only of zeros."""
        found = {v for t in targets for v in t.node.outputs if v.requires_grad}
        for node in reversed(self.nodes):
            if not found.isdisjoint(node.outputs):
                found.update(v for v in node.inputs if v.requires_grad)
        return found

    @cached_property
    def vector_slots(self) -> Mapping[Value, int]:
        """Index of every vector."""
        return {v: i for i, v in enumerate(self.vectors)}

    def narrow(self, targets: Sequence[Target]) -> Program:
        """Return the program of some of the targets; one for equal targets."""
        if len(targets) == len(self.targets):
            return self
        known = self._narrowed.get(tuple(targets))
        if known is None:
            # A later run of the step may have given maps another node: that of a chain.
            made = {v: node for node in self.nodes for v in node.outputs}
            known = Program.build(targets, set(self.reads).__contains__, self.reference, made)
            self._narrowed[tuple(targets)] = known
        return known

    @cached_property
    def _narrowed(self) -> dict[tuple[Target, ...], Program]:
        return {}

    @cached_property
    def parts(self) -> Sequence[Program]:
        """The programs of the segment's parts (see [Note: parts]); of a single part, the program itself."""
        if len(self.targets) == 1 and self.targets[0].requires_grad:
            return [self]
        groups = connected_targets(self)
        if len(groups) == 1 and len(groups[0]) == len(self.targets):
            return [self]
        return [self.narrow(targets) for targets in groups]

    @cached_property
    def recallable(self) -> Mapping[Target, tuple[Target, ...]]:
        """The stored maps that can be recalled, each with the reductions that read it; see [Note: recall]."""
        reductions = {t.node.serial: t for t in self.targets if t.stored is None}
        readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for v in node.maps:
                readers.setdefault(v, []).append(node)
        found: dict[Target, tuple[Target, ...]] = {}
        for t in self.targets:
            nodes = readers.get(t.stored, ()) if t.stored is not None else ()
            if nodes and t.requires_grad and needs_no_result(t.node) and all(map(is_recallable_reduction, nodes)):
                found[t] = tuple(reductions[n.serial] for n in nodes)
        return found

    @cached_property
    def prefetched(self) -> list[Value]:
        """Images whose sources prefetch boxes."""
        return [v for v in self.reads if v.node is not None and isinstance(v.node.op, Source) and v.node.op.prefetches]

    def owned(self, grid: Grid) -> Iterator[tuple[Box, ...]]:
        """Yield the boxes that each tile owns, one for each target."""
        return grid.partition(self.extents, self.reference)

    def cuts(self, grid: Grid) -> list[list[tuple[int, ...]]]:
        """Return the cuts of a grid on each axis of every target."""
        return grid.ends(self.extents, self.reference)

    @cached_property
    def key(self) -> HashedKey | None:
        """The exact key of the program; None if it has none. See `program.key`."""
        slots, vectors, numbers = self.map_slots, self.vector_slots, {n.serial: i for i, n in enumerate(self.nodes)}
        try:
            nodes = tuple(
                (
                    structural_key(n.op),
                    structural_key(n.inplace),
                    tuple((v.is_map, slots[v] if v.is_map else vectors[v]) for v in n.inputs),
                    tuple(map(value_key, n.outputs)),
                )
                for n in self.nodes
            )
        except Unkeyed:
            return None
        return HashedKey(
            (
                nodes,
                tuple(map(value_key, self.reads)),
                tuple(map(value_key, self.vectors)),
                tuple((numbers[t.node.serial], t.stored is not None) for t in self.targets),
                frozenset(numbers[serial] for serial in self.in_place),
                self.reference,
            )
        )

    @property
    def extents(self) -> list[tuple[int, ...]]:
        """Extents of the targets' maps."""
        return [t.map.space.extent for t in self.targets]

    def boxes(self, owned: Sequence[Box]) -> dict[Value, Box]:
        """Return the box that a tile holds of every map: the hull of its readers' needs, from the targets back."""
        need: dict[Value, Box] = {}
        reducing = {t.node: box for t, box in zip(self.targets, owned, strict=True) if t.stored is None}
        for t, box in zip(self.targets, owned, strict=True):
            if t.stored is not None and not box.empty:
                need[t.stored] = box
        for node, made, needed in self.reversed_nodes:
            out = reducing.get(node) if made is None else need.get(made)
            if out is None or out.empty:
                continue
            for v, wanted in zip(node.maps, needed(out), strict=True):
                held = need.get(v)
                need[v] = wanted if held is None else held.hull(wanted)
        return need

    @cached_property
    def reversed_nodes(self) -> list[tuple[Node, Value | None, Callable[[Box], tuple[Box, ...]]]]:
        """The nodes from last to first, each with the map that it makes (None for a reduction) and its ``need``.

        Cached, since a search computes boxes ten thousand times.
        """
        found: list[tuple[Node, Value | None, Callable[[Box], tuple[Box, ...]]]] = []
        for node in reversed(self.nodes):
            assert isinstance(node.op, (TileOp, ReduceOp))
            found.append((node, None if isinstance(node.op, ReduceOp) else node.outputs[0], node.op.need))
        return found


def is_view(value: Value) -> bool:
    """True for a map that may share its memory, or that is made as a view of a new tensor: autograd copies on a write
    through a view."""
    op = value.node.op if value.node is not None else None
    return not isinstance(op, TileOp) or op.kind == "layout" or op.returns_view


def can_run_in_place(node: Node, nodes: Sequence[Node], targets: Sequence[Target], reads: Container[Value]) -> bool:
    """True if a node that the user called in place can run in place: the segment makes its input, and no other node
    reads it."""
    if node.inplace is None or not isinstance(node.inputs[0].layout, type(node.outputs[0].layout)):
        return False
    source = node.inputs[0]
    if source in reads or any(t.stored is source for t in targets) or node.maps.count(source) != 1:
        return False
    if is_view(source):
        return False
    return sum(source in other.inputs for other in nodes) == 1


def targets_of(plan: Plan, nodes: Sequence[Node]) -> list[list[Target]]:
    """Return the targets of each segment of a plan."""
    targets = []
    for segment in plan.segments:
        here = []
        for place in segment.targets:
            if not 0 <= place < len(nodes):
                raise PlanError(f"the plan names node {place}, the network has {len(nodes)}: it is another network's")
            node = nodes[place]
            here.append(Target(node) if isinstance(node.op, ReduceOp) else Target(node, node.outputs[0]))
        targets.append(here)
    return targets


def programs(plan: Plan, nodes: Sequence[Node]) -> Iterator[tuple[SegmentPlan, list[Target], Program | None]]:
    """Yield each segment of a plan with its targets and its program; None for the program of a kept segment."""
    made: set[Value] = set()
    for segment, targets in zip(plan.segments, targets_of(plan, nodes), strict=True):
        yield segment, targets, None if segment.keep else Program.build(targets, made.__contains__)
        made.update(v for t in targets for v in t.node.outputs if v.is_map)


def connected_targets(program: Program) -> list[list[Target]]:
    """Group the targets that require grad by the nodes and boundaries that their gradients reach."""
    nodes = {n.serial for n in program.nodes}
    group_of: dict[object, int] = {}
    groups: dict[int, list[Target]] = {}
    for i, target in enumerate(program.targets):
        if not target.requires_grad:
            continue
        reached = gradient_path(target, nodes)
        overlapping = {group_of[s] for s in reached if s in group_of}
        groups[i] = [*(t for g in sorted(overlapping) for t in groups.pop(g)), target]
        merged = {s for s, g in group_of.items() if g in overlapping}
        group_of.update(dict.fromkeys(reached | merged, i))
    order = {t: i for i, t in enumerate(program.targets)}
    return sorted((sorted(g, key=lambda t: order[t]) for g in groups.values()), key=lambda g: order[g[0]])


def gradient_path(target: Target, nodes: set[int]) -> set[object]:
    """Return the serial numbers of the nodes that a target's gradient passes, and the boundaries that it reaches."""
    found: set[object] = set()
    stack: list[Node] = [target.node]
    while stack:
        node = stack.pop()
        if node.serial in found:
            continue
        found.add(node.serial)
        for v in node.maps:
            if not v.requires_grad or v.node is None or isinstance(v.node.op, (Source, Spread)):
                continue
            if v.node.serial in nodes:
                stack.append(v.node)
            else:
                found.add(("boundary", v))
    return found


def is_recallable_reduction(node: Node) -> bool:
    """True for a reduction of one map whose derivative depends on that map's tiles alone."""
    op = node.op
    if not isinstance(op, ReduceOp) or op.compares_results or len(node.maps) != 1:
        return False
    return not any(v.requires_grad for v in node.vectors)


def needs_no_result(node: Node) -> bool:
    """True for a node whose gradients can be computed without its result."""
    return isinstance(node.op, TileOp) and node.op.unread(Box.whole(node.outputs[0].space.extent)) is not None


@dataclass(frozen=True, eq=False)
class BackwardProgram:
    """Program of a backward that recalls: without the ``reductions`` of the recalled maps."""

    program: Program
    reductions: tuple[Target, ...]

    @staticmethod
    def of(whole: Program) -> BackwardProgram:
        reductions = tuple(t for found in whole.recallable.values() for t in found)
        return BackwardProgram(whole.narrow([t for t in whole.targets if t not in reductions]), reductions)

    @property
    def maps(self) -> tuple[Value, ...]:
        """The recalled maps."""
        return tuple(dict.fromkeys(t.map for t in self.reductions))
