"""Random networks: directed acyclic graphs of the engine's operators, with what surrounds them in real training code.

Modules used twice, operators in place, frozen parameters, several inputs with and without gradient at several sizes,
several outputs at different strides, losses on maps; and random plans, because the result must not depend on them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin.boxes import Grid
from lightning_plugin.engine import Engine
from lightning_plugin.graph import Node, Recording, Value
from lightning_plugin.ops import ReduceOp, Source, Spread, TileOp
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.parameters import streamable
from lightning_plugin.program.fixed import can_be_stored, fit_grid, maps_read_later, plan_of_stages, share_halos, stages
from lightning_plugin.program.pieces import source_of_uncut, uncut_axes
from lightning_plugin.program.program import Program, targets_of
from tests.lightning_plugin import operators
from tests.lightning_plugin.operators import Apply, Draw
from tests.zoo import fill

LARGEST = 6000
#: The longest side of an input, by number of axes.
SIDES = {1: 47, 2: 17, 3: 7}


class RandomNet(nn.Module):
    """Modules that each read earlier values and add one."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.steps = nn.ModuleList()
        self.sources: list[tuple[int, ...]] = []
        self.outputs: list[int] = []

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        known = list(values)
        for step, sources in zip(self.steps, self.sources, strict=True):
            known.append(step(*(known[i] for i in sources)))
        return tuple(known[i] for i in self.outputs)

    def __repr__(self) -> str:
        lines = [
            f"  {self.inputs + i} = {step}{s}" for i, (step, s) in enumerate(zip(self.steps, self.sources, strict=True))
        ]
        return "\n".join([f"RandomNet({self.inputs} inputs)", *lines, f"  returns {self.outputs}"])


@dataclass(eq=False)
class AnyPlan(Engine):
    """A plan that stores whatever maps it was told to, keeps whatever stages it was told to whole, on any grids.

    ``stored`` are places of nodes, ``kept`` places of stages; both wrap around, so that they mean something for every
    network. With ``rows``, segments are cut into so many rows of tiles, which share halos where they can. Of four
    segments, those at the places ``spilled`` store on the disk, those at ``ahead`` transfer tiles beside others,
    and of those that store on the device and recompute halos, those at ``dropped`` drop what they store, to depths of 1
    to ``deepest``; of others, those at ``recalled`` read it back. Keys are stored, and read in so many ``pieces``,
    wherever they can be. Of four parameters, those at ``on_host`` and ``on_disk`` live there, and copies of them are
    fetched ahead or not.
    """

    stored: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    grids: tuple[tuple[int, ...], ...] = ((2, 2, 2),)
    rows: int = 0
    cycle: int = 24
    spilled: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    deepest: int = 1
    recalled: frozenset[int] = frozenset()
    pieces: int = 1
    on_host: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()
    fetched_ahead: bool = False
    scans: int = 0
    transfers: int = 0
    drops: int = 0
    recalls: int = 0
    streams: int = 0
    streamed: int = 0
    noted: list[str] = field(default_factory=list)

    def choose(self, recording: Recording) -> Plan:
        nodes = recording.nodes
        self.noted += [n.label for n in nodes if n.op.kind == "barrier"]
        maps = [n.outputs[0] for n in nodes if isinstance(n.op, TileOp)]
        found = {v for i, v in enumerate(maps) if i % self.cycle in self.stored and can_be_stored(v)}
        if self.pieces > 1:
            found |= {v for v in keys(nodes) if can_be_stored(v)}
        while True:
            stage = stages(nodes, found)
            more = found | maps_read_later(nodes, stage)
            if more == found:
                break
            found = more
        plan = plan_of_stages(nodes, found, stage, None, None)
        plan = Plan(tuple(self.segment(i, s, nodes, stage) for i, s in enumerate(plan.segments)))
        if self.rows:
            plan = share_halos(plan, nodes)
            self.scans += sum(s.halo == "share" for s in plan.segments)
        plan = replace(plan, segments=tuple(self.placed(i, s) for i, s in enumerate(plan.segments)))
        if self.pieces > 1:
            plan = self.in_pieces(plan, nodes)
        self.transfers += any(s.tier == "disk" for s in plan.segments) and any(s.ahead for s in plan.segments)
        self.drops += any(s.drop for s in plan.segments)
        return self.homed(plan, recording)

    def homed(self, plan: Plan, recording: Recording) -> Plan:
        """A plan with parameters below the device."""
        places = list(enumerate(streamable(Network(recording), least=1)))
        host = tuple(place for i, place in places if i % 4 in self.on_host)
        disk = tuple(place for i, place in places if i % 4 in self.on_disk - self.on_host)
        self.streamed += bool(host or disk)
        return replace(plan, on_host=host, on_disk=disk, fetched_ahead=self.fetched_ahead)

    def placed(self, i: int, s: SegmentPlan) -> SegmentPlan:
        if s.keep:
            return s
        spill = i % 4 in self.spilled
        may = i % 4 in self.dropped and not spill and s.halo == "recompute"
        drop = 1 + (7 * i) % self.deepest if may else 0
        recall = i % 4 in self.recalled and not drop and s.halo == "recompute"
        self.recalls += recall
        return replace(s, tier="disk" if spill else "device", ahead=i % 4 in self.ahead, drop=drop, recall=recall)

    def in_pieces(self, plan: Plan, nodes: Sequence[Node]) -> Plan:
        made: set[Value] = set()
        segments = []
        for s, targets in zip(plan.segments, targets_of(plan, nodes), strict=True):
            if not s.keep and s.halo == "recompute" and uncut_axes(Program.build(targets, lambda v: v in made)):
                s = replace(s, pieces=self.pieces)
                self.streams += 1
            segments.append(s)
            made.update(v for t in targets for v in t.node.outputs if v.is_map and (s.keep or t.stored is not None))
        return replace(plan, segments=tuple(segments))

    def segment(self, i: int, s: SegmentPlan, nodes: Sequence[Node], stage: dict[Value, int]) -> SegmentPlan:
        if i % self.cycle in self.kept:
            first = nodes[s.targets[0]]
            when = stage[first.outputs[0]] - isinstance(first.op, ReduceOp)
            return SegmentPlan(whole_stage(nodes, stage, when), s.forward, s.backward, keep=True)
        axes = len(s.forward.counts)
        if self.rows:
            rows = Grid((self.rows, *(1,) * (axes - 1)))
            return SegmentPlan(s.targets, rows, rows)
        forward = fit_grid(Grid(self.grids[i % len(self.grids)]), axes)
        backward = fit_grid(Grid(self.grids[(i + 1) % len(self.grids)][::-1]), axes)
        return SegmentPlan(s.targets, forward, backward)


def keys(nodes: Sequence[Node]) -> list[Value]:
    """What attention may read piece by piece."""
    made = (n.maps[place] for n in nodes if isinstance(n.op, TileOp) for place in n.op.inputs_in_pieces)
    return [source for v in made if (source := source_of_uncut(v)) is not None]


def whole_stage(nodes: Sequence[Node], stage: dict[Value, int], when: int) -> tuple[int, ...]:
    """Every node on maps that belongs to a stage."""
    return tuple(
        place
        for place, n in enumerate(nodes)
        if isinstance(n.op, (TileOp, ReduceOp))
        and not isinstance(n.op, (Source, Spread))
        and stage[n.outputs[0]] - isinstance(n.op, ReduceOp) == when
    )


@dataclass
class Case:
    """One example: a network, what goes in, how it runs, what is asked of its results."""

    net: RandomNet
    shapes: list[tuple[int, ...]]
    grads: list[bool]
    losses: list[str]
    plan: AnyPlan
    seed: int


@st.composite
def cases(draw: Draw) -> Case:
    axes = draw(st.sampled_from([1, 2, 2, 2, 3]))
    batch = draw(st.integers(1, 3))
    shapes = [input_shape(draw, axes, batch)]
    if draw(st.integers(0, 2)) == 0:
        shapes.append(second_shape(draw, shapes[0]))
    net = grow(draw, shapes)
    seed = draw(st.integers(0, 1000))
    fill(net.double(), seed)
    for p in net.parameters():
        p.requires_grad_(draw(st.integers(0, 5)) > 0)
    if draw(st.integers(0, 4)) == 0:
        net.eval()
    losses = [draw(st.sampled_from(["weighted", "square", "target", "classes"])) for _ in net.outputs]
    return Case(net, shapes, [draw(st.booleans()) for _ in shapes], losses, draw(plans()), seed)


def plans(tiles: int = 5) -> st.SearchStrategy[AnyPlan]:
    """Plans of at most so many tiles along an axis."""
    grids = st.lists(st.tuples(*(st.integers(1, tiles),) * 3), min_size=1, max_size=3)
    places = st.sets(st.integers(0, 23), max_size=8).map(frozenset)
    few = st.sets(st.integers(0, 3)).map(frozenset)
    return st.builds(
        lambda stored, kept, grids, rows, **tiers: AnyPlan(
            stored=stored, kept=kept, grids=tuple(grids), rows=max(0, rows), **tiers
        ),
        places,
        st.sets(st.integers(0, 7), max_size=2).map(frozenset),
        grids,
        st.integers(-8, 6),
        spilled=few,
        ahead=few,
        dropped=few,
        deepest=st.integers(1, 3),
        recalled=few,
        pieces=st.sampled_from([1, 1, 2, 3, 7]),
        on_host=few,
        on_disk=few,
        fetched_ahead=st.booleans(),
    )


def input_shape(draw: Draw, axes: int, batch: int) -> tuple[int, ...]:
    sides = tuple(draw(st.integers(3, SIDES[axes])) for _ in range(axes))
    return (batch, draw(st.integers(1, 4)), *sides)


def second_shape(draw: Draw, first: tuple[int, ...]) -> tuple[int, ...]:
    """Another image, of the same size or at half the resolution."""
    divisor = draw(st.integers(1, 2))
    return (first[0], draw(st.integers(1, 3)), *(-(-s // divisor) for s in first[2:]))


def grow(draw: Draw, shapes: Sequence[tuple[int, ...]]) -> RandomNet:
    net = RandomNet(len(shapes))
    known: list[tuple[int, ...]] = list(shapes)
    readers = [0] * len(known)
    for _ in range(draw(st.integers(1, 9))):
        drawn = overwrite(draw, net, known, readers) or join(draw, net, known) or unary(draw, net, known)
        if drawn is None:
            continue
        step, sources = drawn
        shape = shape_after(step, [known[i] for i in sources])
        if shape is None:
            continue
        net.steps.append(step)
        net.sources.append(sources)
        known.append(shape)
        readers.append(0)
        for i in sources:
            readers[i] += 1
    net.outputs = leaves(draw, readers, len(shapes))
    return net


def unary(draw: Draw, net: RandomNet, known: Sequence[tuple[int, ...]]) -> tuple[nn.Module, tuple[int, ...]] | None:
    place = recent(draw, len(known))
    again = [s for s in net.steps if isinstance(s, (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.PReLU))]
    if again and draw(st.integers(0, 5)) == 0:  # a module used twice
        return draw(st.sampled_from(again)), (place,)
    make = draw(st.sampled_from(operators.UNARY))
    if make is operators.pixel_shuffle and len(known[place]) != 4:
        return None
    return make(draw, known[place]), (place,)


def recent(draw: Draw, count: int) -> int:
    """Mostly the last value, so that networks are deep; else any."""
    return count - 1 if draw(st.integers(0, 2)) else draw(st.integers(0, count - 1))


def join(draw: Draw, net: RandomNet, known: Sequence[tuple[int, ...]]) -> tuple[nn.Module, tuple[int, ...]] | None:
    """A skip connection, a concatenation, a gate: two values of one size meet."""
    if draw(st.integers(0, 3)) != 0:
        return None
    last = len(known) - 1
    others = [i for i, s in enumerate(known[:-1]) if s[2:] == known[last][2:]]
    if not others:
        return None
    other = draw(st.sampled_from(others))
    if known[other][1] == known[last][1] and draw(st.booleans()):
        return Apply(draw(st.sampled_from([torch.add, torch.mul, torch.maximum, torch.sub]))), (last, other)
    return Apply(concatenate), (other, last)


def concatenate(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, 1)


def overwrite(
    draw: Draw, net: RandomNet, known: Sequence[tuple[int, ...]], readers: Sequence[int]
) -> tuple[nn.Module, tuple[int, ...]] | None:
    """Something in place, on a value that nobody has read yet and whose maker does not need it for backward."""
    last = len(known) - 1
    if not net.steps or readers[last] or not isinstance(net.steps[-1], operators.OVERWRITABLE):
        return None
    if draw(st.booleans()):
        return None
    others = [i for i in range(last) if known[i] == known[last]]
    if others and draw(st.booleans()):
        return Apply(Tensor.add_), (last, draw(st.sampled_from(others)))
    return operators.activation(draw, known[last], inplace=True), (last,)


def leaves(draw: Draw, readers: Sequence[int], inputs: int) -> list[int]:
    """What is returned: the last value, what nobody else reads, now and then something inside as well."""
    unread = [i for i, n in enumerate(readers) if i >= inputs and n == 0]
    inside = [i for i in range(inputs, len(readers)) if readers[i]]
    found = set(unread or [len(readers) - 1])
    if inside and draw(st.integers(0, 3)) == 0:
        found.add(draw(st.sampled_from(inside)))
    return sorted(found)


def shape_after(step: nn.Module, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of a step's result, or None where PyTorch refuses it or it is of no use here."""
    twin = copy.deepcopy(step).to("meta")
    try:
        shape = tuple(twin(*(torch.empty(s, device="meta") for s in shapes)).shape)
    except (RuntimeError, ValueError):
        return None
    size = torch.Size(shape).numel()
    statistics = isinstance(step, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm))
    few = statistics and size // (shape[0] * shape[1]) < 4  # a variance of two values is badly conditioned
    return None if not 0 < size <= LARGEST or few else shape
