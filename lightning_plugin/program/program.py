"""A segment made ready to run: which nodes a tile evaluates, in which order, on which boxes.

[Note: parts] Two networks, or two heads on a frozen trunk, may share a segment, and with it the reading of tiles and
the trunk. To autograd they have nothing to do with each other: their losses are pulled back one after the other, in any
order, or one of them never. So each part of a segment whose targets are connected by values that require grad has an
`autograd.Function` of its own, that computes its own tiles again. Forward runs once for all. Targets that read the same
boundary are connected too: what made it is pulled back once.

[Note: recall] A statistic's derivative needs the values of the map that it is of, and so a train-mode BatchNorm has the
convolution before it computed again in backward, although its result is stored. A segment that *recalls* reads it from
there. What its reductions add to the cotangent of the map is found tile by tile, of values that were stored, and with
that the reductions are done: they are no targets of the backward, and nobody reads the result of the convolution, which
is not made (see [Note: unread] in `rules.unread`).

That is so of a map whose operator can do without its result and which reductions alone read within the segment, as the
one map that they look at, with no gradient to any vector and not to find results by their bits. The segment leases what
it recalls, as a reader would: so it is there until the segment's own backward is over, which comes after that of every
reader. That is memory on the device, or a read from a lower tier; a plan says which segments do it. Of identical tiles
([Note: identical tiles] in `execute.tile_pass`) one is read for what the reductions add to all of them. What is kept as
bfloat16 is not what was computed, what is dropped is not there, and a scan makes its rows in another order: these are
not recalled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from lightning_plugin.boxes import Box, Grid, reference_of
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp, Reduction, Source, Spread, TileOp
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.program.key import Unkeyed, key, value_key


@dataclass(frozen=True, eq=False)
class Target:
    """Result of a segment: a stored map, or the vectors of a reduce node."""

    node: Node
    stored: Value | None = None

    @property
    def map(self) -> Value:
        """The map whose positions the target's tiles partition."""
        return self.stored if self.stored is not None else self.node.maps[0]

    @property
    def op(self) -> ReduceOp:
        """The operator of a target that is reduced."""
        assert isinstance(self.node.op, ReduceOp)
        return self.node.op

    def contribution(self, box: Box, tiles: Sequence[Tensor], vectors: Mapping[Value, Tensor], times: int) -> Reduction:
        """Contribution of one tile, or of so many identical ones, to a target that is reduced."""
        return self.op.repeat(self.op.partial(box, tiles, self.operands(vectors)), times)

    def finish(self, total: Reduction, vectors: Mapping[Value, Tensor]) -> tuple[Tensor, ...]:
        """The results of a target that is reduced."""
        return self.op.finish(total, self.operands(vectors))

    def operands(self, vectors: Mapping[Value, Tensor]) -> list[Tensor]:
        return [vectors[v] for v in self.node.vectors]

    @property
    def requires_grad(self) -> bool:
        return self.stored.requires_grad if self.stored is not None else any(v.requires_grad for v in self.node.outputs)


@dataclass(frozen=True, eq=False)
class Program:
    """The part of the graph between what is stored and a segment's targets.

    ``reference`` is how far the map extends whose cuts the targets follow: the smallest of the segment's, also where
    the program makes only some of them, so that a grid cuts them as it does for the segment.
    """

    targets: tuple[Target, ...]
    steps: tuple[Node, ...]
    reads: tuple[Value, ...]
    vectors: tuple[Value, ...]
    last_use: Mapping[Value, int] = field(default_factory=dict)
    overwrite: frozenset[int] = frozenset()
    reference: tuple[int, ...] = ()

    @staticmethod
    def build(
        targets: Sequence[Target], available: Callable[[Value], bool], reference: tuple[int, ...] = ()
    ) -> Program:
        """Walk from the targets to what is available: sources, spread vectors and maps that are stored already."""
        steps: dict[int, Node] = {}
        reads: dict[Value, None] = {}
        vectors: dict[Value, None] = {}
        stack: list[Node] = []
        for t in targets:
            if t.stored is None:
                stack.append(t.node)
            elif available(t.stored):
                raise ValueError(f"{t.stored.label} is stored twice")
            else:
                stack.append(t.node)
        while stack:
            node = stack.pop()
            if node.serial in steps:
                continue
            steps[node.serial] = node
            for v in node.inputs:
                if not v.is_map:
                    vectors.setdefault(v)
                elif available(v) or isinstance(v.node.op, (Source, Spread)):  # type: ignore[union-attr]
                    reads.setdefault(v)
                else:
                    stack.append(v.node)  # type: ignore[arg-type]
        order = tuple(steps[s] for s in sorted(steps))
        last = {v: i for i, node in enumerate(order) for v in node.inputs if v.is_map}
        overwrite = frozenset(n.serial for n in order if may_overwrite(n, order, targets, reads))
        reference = reference or reference_of([t.map.space.extent for t in targets])
        return Program(tuple(targets), order, tuple(reads), tuple(vectors), last, overwrite, reference)

    @cached_property
    def slots(self) -> Mapping[Value, int]:
        """The number of every map: first those that are read, then those that are made."""
        made = (v for node in self.steps for v in node.outputs if v.is_map)
        return {v: i for i, v in enumerate((*self.reads, *made))}

    @cached_property
    def unread(self) -> frozenset[int]:
        """The nodes, by serial, whose results are stored and read by none of the program's: backward needs their
        gradients alone, where they have any. See [Note: unread] in `rules.unread`."""
        stored = [(t.node, t.stored) for t in self.targets if t.stored is not None]
        return frozenset(n.serial for n, v in stored if v.requires_grad and v not in self.last_use)

    @cached_property
    def places(self) -> Mapping[Value, int]:
        """The number of every vector."""
        return {v: i for i, v in enumerate(self.vectors)}

    def narrow(self, targets: Sequence[Target]) -> Program:
        """The program that makes some of the targets."""
        if len(targets) == len(self.targets):
            return self
        return Program.build(targets, set(self.reads).__contains__, self.reference)

    @cached_property
    def announced(self) -> list[Value]:
        """The images that want to hear of boxes before they are read."""
        return [v for v in self.reads if v.node is not None and isinstance(v.node.op, Source) and v.node.op.prefetches]

    def owned(self, grid: Grid) -> Iterator[tuple[Box, ...]]:
        """Boxes of every target that each tile owns."""
        return grid.partition(self.extents, self.reference)

    def ends(self, grid: Grid) -> list[list[tuple[int, ...]]]:
        """Cuts of a grid on each axis of every target."""
        return grid.ends(self.extents, self.reference)

    @cached_property
    def key(self) -> Hashable | None:
        """The exact key of the program; None where there is none. See `program.key`."""
        slots, vectors, numbers = self.slots, self.places, {n.serial: i for i, n in enumerate(self.steps)}
        try:
            steps = tuple(
                (
                    key(n.op),
                    key(n.inplace),
                    tuple((v.is_map, slots[v] if v.is_map else vectors[v]) for v in n.inputs),
                    tuple(map(value_key, n.outputs)),
                )
                for n in self.steps
            )
        except Unkeyed:
            return None
        return (
            steps,
            tuple(map(value_key, self.reads)),
            tuple(map(value_key, self.vectors)),
            tuple((numbers[t.node.serial], t.stored is not None) for t in self.targets),
            frozenset(numbers[serial] for serial in self.overwrite),
            self.reference,
        )

    @property
    def extents(self) -> list[tuple[int, ...]]:
        """Extents of the targets' maps."""
        return [t.map.space.extent for t in self.targets]

    def boxes(self, owned: Sequence[Box]) -> dict[Value, Box]:
        """The box of every map that a tile has to hold: hulls of what its readers need, from the targets back."""
        need: dict[Value, Box] = {}
        reducing = {t.node: box for t, box in zip(self.targets, owned, strict=True) if t.stored is None}
        for t, box in zip(self.targets, owned, strict=True):
            if t.stored is not None and not box.empty:
                need[t.stored] = box
        for node, made, needed in self.back:
            out = reducing.get(node) if made is None else need.get(made)
            if out is None or out.empty:
                continue
            for v, wanted in zip(node.maps, needed(out), strict=True):
                held = need.get(v)
                need[v] = wanted if held is None else held.hull(wanted)
        return need

    @cached_property
    def back(self) -> list[tuple[Node, Value | None, Callable[[Box], tuple[Box, ...]]]]:
        """From the targets back, each operator's node, the map that it makes unless it reduces, and what it needs. A
        search asks for boxes ten thousand times."""
        found: list[tuple[Node, Value | None, Callable[[Box], tuple[Box, ...]]]] = []
        for node in reversed(self.steps):
            assert isinstance(node.op, (TileOp, ReduceOp))
            found.append((node, None if isinstance(node.op, ReduceOp) else node.outputs[0], node.op.need))
        return found


def is_view(value: Value) -> bool:
    """True of a map that may lie in memory that others read, or is made as a view of a fresh result.

    Autograd pays for writing through a view with copies of it, so neither is overwritten.
    """
    op = value.node.op if value.node is not None else None
    return not isinstance(op, TileOp) or op.kind == "layout" or op.views


def may_overwrite(node: Node, steps: Sequence[Node], targets: Sequence[Target], reads: Container[Value]) -> bool:
    """True of a node that the user wrote in place and that may be run in place: its input is this segment's own and
    nobody else's."""
    if node.inplace is None or not isinstance(node.inputs[0].layout, type(node.outputs[0].layout)):
        return False
    source = node.inputs[0]
    if source in reads or any(t.stored is source for t in targets) or node.maps.count(source) != 1:
        return False
    if is_view(source):
        return False
    return sum(source in other.inputs for other in steps) == 1


def resolve(plan: Plan, nodes: Sequence[Node]) -> list[list[Target]]:
    """The nodes a plan speaks of."""
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
    """Each segment with its targets, and with its program, if it has tiles."""
    made: set[Value] = set()
    for segment, targets in zip(plan.segments, resolve(plan, nodes), strict=True):
        yield segment, targets, None if segment.keep else Program.build(targets, made.__contains__)
        made.update(v for t in targets for v in t.node.outputs if v.is_map)


def connected(program: Program) -> list[list[Target]]:
    """The targets that require grad, grouped by what they are computed from; each group in the program's order."""
    steps = {n.serial for n in program.steps}
    group_of: dict[object, int] = {}
    groups: dict[int, list[Target]] = {}
    for i, target in enumerate(program.targets):
        if not target.requires_grad:
            continue
        reached = differentiated(target, steps)
        met = {group_of[s] for s in reached if s in group_of}
        joined = [t for g in sorted(met) for t in groups.pop(g)]
        groups[i] = [*joined, target]
        merged = {s for s, g in group_of.items() if g in met}
        group_of.update(dict.fromkeys(reached | merged, i))
    order = {t: i for i, t in enumerate(program.targets)}
    return sorted((sorted(g, key=lambda t: order[t]) for g in groups.values()), key=lambda g: order[g[0]])


def differentiated(target: Target, steps: set[int]) -> set[object]:
    """The steps that a target's gradient runs through, by serial, and the boundaries that it reaches."""
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
            if v.node.serial in steps:
                stack.append(v.node)
            else:
                found.add(("boundary", v))
    return found


def parts_of(program: Program) -> Sequence[Program]:
    """The programs of a segment's parts; a segment that is one part is its own."""
    if len(program.targets) == 1 and program.targets[0].requires_grad:
        return [program]
    groups = connected(program)
    if len(groups) == 1 and len(groups[0]) == len(program.targets):
        return [program]
    return [program.narrow(targets) for targets in groups]


def recallable(program: Program) -> Mapping[Target, tuple[Target, ...]]:
    """The reductions of each stored map that may be recalled."""
    reductions = {t.node.serial: t for t in program.targets if t.stored is None}
    readers: dict[Value, list[Node]] = {}
    for node in program.steps:
        for v in node.maps:
            readers.setdefault(v, []).append(node)
    found: dict[Target, tuple[Target, ...]] = {}
    for t in program.targets:
        nodes = readers.get(t.stored, ()) if t.stored is not None else ()
        if nodes and t.requires_grad and is_unread(t.node) and all(map(looks_alone, nodes)):
            found[t] = tuple(reductions[n.serial] for n in nodes)
    return found


def looks_alone(node: Node) -> bool:
    """True of a reduction of one map, whose derivative needs no more than that map's tiles."""
    op = node.op
    if not isinstance(op, ReduceOp) or op.seeks or len(node.maps) != 1:
        return False
    return not any(v.requires_grad for v in node.vectors)


def is_unread(node: Node) -> bool:
    """True of a node that can be pulled back without its result."""
    return isinstance(node.op, TileOp) and node.op.unread(Box.whole(node.outputs[0].space.extent)) is not None


@dataclass(frozen=True, eq=False)
class InBackward:
    """A ``program`` as its backward runs it: without the ``reductions`` of what is recalled."""

    program: Program
    reductions: tuple[Target, ...]

    @staticmethod
    def of(whole: Program) -> InBackward:
        reductions = tuple(t for found in recallable(whole).values() for t in found)
        return InBackward(whole.narrow([t for t in whole.targets if t not in reductions]), reductions)

    @property
    def maps(self) -> tuple[Value, ...]:
        """The maps that are recalled."""
        return tuple(dict.fromkeys(t.map for t in self.reductions))
