"""Run a plan segment by segment; all other operators run with ordinary autograd."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lightning_plugin.chain import Body, Chain
from lightning_plugin.errors import PlanError
from lightning_plugin.execute.chain import CHAIN, FIRST_LINK_PLACE, run_chain
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.function import run_segment
from lightning_plugin.execute.keep import find_batch_norms, run_node, whole_map
from lightning_plugin.execute.room import Guard, leaf_tensors
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.streams import Streams, Use
from lightning_plugin.graph import Node, Recording, Value, ancestors, with_requires_grad
from lightning_plugin.layout import copy_like
from lightning_plugin.ledger import watched
from lightning_plugin.ops import Barrier, Captured, Gather, Spread, VectorOp
from lightning_plugin.plan import ChainPlan, Plan, SegmentPlan
from lightning_plugin.private import tree_leaves, without_autocast
from lightning_plugin.program.fixed import kept_segments
from lightning_plugin.program.program import Program, Target, programs
from lightning_plugin.program.replay import Replays
from lightning_plugin.progress import profiler_range
from lightning_plugin.residency.tiers import Home
from lightning_plugin.residency.transfer import TransferQueue

#: Plans of one recording that stay prepared.
MAX_PREPARED = 4


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan prepared for runs of the nodes that it was made for: what depends on nothing else.

    Attributes:
        nodes: The nodes.
        stages: The segments.
        gathers: The nodes that make maps one tensor, by the place of the segment that makes the map.
        captured: The captured tensors.
        below: The captured tensors that the plan puts below the device.
        chains: The plan of each chain, by its node's serial number.
        background: The last segment that groups identical tiles.
    """

    nodes: Sequence[Node]
    stages: Sequence[Stage]
    gathers: Mapping[int, Sequence[Node]]
    captured: Sequence[Value]
    below: Collection[Value] = ()
    chains: Mapping[int, ChainPlan] = field(default_factory=dict)
    background: int = 0

    @staticmethod
    def of(plan: Plan, nodes: Sequence[Node], first: int = 0) -> Prepared:
        """Prepare a plan, whose segments' places count from ``first``."""
        stages = prepare_stages(plan, nodes, first)
        made = {v: stage.place for stage in stages for t in stage.targets for v in t.node.outputs}
        gathers: dict[int, list[Node]] = {}
        for node in nodes:
            if isinstance(node.op, Gather) and node.inputs[0] in made:
                gathers.setdefault(made[node.inputs[0]], []).append(node)
        return Prepared(
            nodes,
            stages,
            gathers,
            [n.outputs[0] for n in nodes if isinstance(n.op, Captured)],
            {nodes[place].outputs[0] for place in (*plan.on_host, *plan.on_disk)},
            {nodes[chain.node].serial: chain for chain in plan.chains},
            max((place for place, s in enumerate(plan.segments, 1) if s.alike), default=0),
        )


def prepare(plan: Plan, recording: Recording) -> Prepared:
    """Prepare a plan for a recording; once, for as long as its nodes serve further steps."""
    known: dict[int, tuple[Plan, Prepared]] = recording.derived.setdefault("prepared", {})
    if id(plan) not in known:
        if len(known) == MAX_PREPARED:
            del known[next(iter(known))]
        known[id(plan)] = plan, Prepared.of(plan, recording.nodes)
    return known[id(plan)][1]


def run_plan(plan: Plan, recording: Recording, frame: Frame) -> None:
    """Run forward, and put every vector into the frame, with a ``grad_fn`` that runs backward under the plan."""
    prepared, step = prepare(plan, recording), frame.step
    streams = make_streams(prepared, plan.fetched_ahead, frame)
    frame = replace(frame, streams=streams, chains=prepared.chains, background_segments=prepared.background)
    run_stages(prepared, frame, make_queue(plan, step))


def make_queue(plan: Plan, step: Step) -> TransferQueue:
    """Make the queue of a run's transfers."""
    make_stand_in = None if step.rehearsal is None else step.rehearsal.make_stand_in
    return TransferQueue(any(s.ahead for s in plan.segments), step.folder, step.progress, make_stand_in)


def run_stages(prepared: Prepared, frame: Frame, queue: TransferQueue) -> None:
    """Run prepared segments, and compute all vectors."""
    rehearsal = frame.step.rehearsal
    try:
        for stage in prepared.stages:
            if rehearsal is not None:
                rehearsal.begin_turn((stage.place, "forward"), False)
            with profiler_range("segment", stage.place, stage.plan.path, "forward"):
                stage.run(frame, queue)
            frame.step.trim_memory()
            for node in prepared.gathers.get(stage.place, ()):
                compute_vector(node.outputs[0], frame)
            for v in stage.last_maps:
                frame.release(v)
        for node in prepared.nodes:
            for v in node.outputs:
                if not v.is_map:
                    compute_vector(v, frame)
        if frame.streams is not None:
            frame.streams.wait()
        if rehearsal is not None:
            rehearsal.begin_turn(None, False)
    finally:
        frame.clear_maps()


def make_streams(prepared: Prepared, ahead: bool, frame: Frame) -> Streams | None:
    """Collect the streamed tensors of a run: those that the plan puts below the device, and those that earlier plans
    have put there."""
    step, nodes = frame.step, prepared.nodes
    if not prepared.below and not step.homes:
        return None
    captured: dict[Value, Tensor] = {}
    for v in prepared.captured:
        found = frame.bindings.captures.get(v)
        if found is not None and (v in prepared.below or found.tensor in step.homes):
            captured[v] = found.tensor
    if not captured:
        return None
    for v in captured:  # on the device in an earlier run of this frame
        frame.vectors.pop(v, None)
    uses = {use: vectors for stage in prepared.stages for use, vectors in stage.uses()}
    uses |= {(-1, n.serial): n.inputs for n in nodes if isinstance(n.op, (VectorOp, Barrier))}
    homes = step.homes if step.rehearsal is None else None
    return Streams(captured, homes, uses, nodes, step.ledger, ahead, step.progress)


@dataclass(eq=False)
class Stage:
    """A segment prepared for a run.

    Attributes:
        plan: Its plan.
        targets: The results that it makes.
        program: The program of its tiles; None if it is kept.
        fused: The pairs of nodes that run as one BatchNorm; see `keep.find_batch_norms`.
        place: Its number in the plan.
        last_maps: The maps that no later segment reads.
        last_reads: For each node of a kept segment, by its serial number, the maps whose last reader it is.
        replays: The replays of its passes.
    """

    plan: SegmentPlan
    targets: Sequence[Target]
    program: Program | None
    fused: Mapping[int, Node]
    place: int
    last_maps: list[Value] = field(default_factory=list)
    last_reads: dict[int, list[Value]] = field(default_factory=dict)
    replays: Replays = field(default_factory=Replays)

    def maps_read(self) -> list[Value]:
        if self.program is not None:
            return list(self.program.reads)
        return [v for t in self.targets for v in t.node.maps]

    def uses(self) -> Iterator[tuple[Use, Sequence[Value]]]:
        """Iterate over the uses of the segment: (use, the vectors that it reads)."""
        if self.program is not None:
            yield (self.place, -1), self.program.vectors
            return
        for t in self.targets:
            yield (self.place, t.node.serial), self.vectors_of(t.node)

    def vectors_of(self, node: Node) -> Sequence[Value]:
        """Return the vectors that a kept node reads; a fused BatchNorm makes its statistics itself."""
        return node.vectors if node.serial not in self.fused else node.vectors[2:]

    def run(self, frame: Frame, queue: TransferQueue) -> None:
        if self.program is None:
            with watched(frame.step.ledger):
                self.run_nodes([t.node for t in self.targets], frame)
        else:
            self.run_tiles(self.program, frame, queue)

    def run_tiles(self, program: Program, frame: Frame, queue: TransferQueue) -> None:
        for v in program.vectors:
            compute_vector(v, frame)
        for v in program.reads:
            assert v.node is not None
            if isinstance(v.node.op, Spread):
                compute_vector(v.node.inputs[0], frame)
        if self.plan.halo == "share" and frame.step.team is not None:
            raise PlanError(
                f"segment {self.place} shares halos, so its tiles run in order and cannot be shared among ranks; use "
                'halo="recompute"'
            )
        home = Home(self.plan.tier, queue)
        with frame.fetch_streamed((self.place, -1), program.vectors):
            run_segment(SegmentRun(program, frame, self.plan, home, self.place, self.replays), frame)

    def run_nodes(self, nodes: Sequence[Node], frame: Frame) -> None:
        guard = Guard(self.plan, nodes, frame.step)
        for place, node in enumerate(nodes):
            partner = self.fused.get(node.serial)
            for v in node.inputs:
                if v.is_map:
                    if v.node is not None and isinstance(v.node.op, Spread):
                        compute_vector(v.node.inputs[0], frame)
                elif partner is None or v.node is not partner:
                    compute_vector(v, frame)
            with frame.fetch_streamed((self.place, node.serial), self.vectors_of(node)):
                run_node(node, frame, self.fused, self.last_reads[node.serial])
            self.hook_backward(node, frame, place, guard)

    def hook_backward(self, node: Node, frame: Frame, place: int, guard: Guard) -> None:
        """Hook the results of a kept node: in backward, begin the segment's turn in a rehearsal, or check the
        budget."""
        turn, rehearsal = (self.place, "backward"), frame.step.rehearsal
        for result in frame.ordinary_tensors(node.outputs):
            if not result.requires_grad:
                continue
            if rehearsal is not None:
                result.register_hook(lambda g: rehearsal.begin_turn(turn, True))
            elif guard.is_needed:
                result.register_hook(partial(guard, place=place))
                guard.leaves += leaf_tensors(frame.ordinary_tensors(node.inputs))


def prepare_stages(plan: Plan, nodes: Sequence[Node], first: int) -> list[Stage]:
    """Prepare the segments of a plan, whose places count from ``first``, and find the last reader of each map."""
    stages = []
    for place, (segment, targets, program) in enumerate(programs(plan, nodes), first):
        fused = find_batch_norms([t.node for t in targets], nodes) if segment.keep else {}
        stages.append(Stage(segment, targets, program, fused, place))
    read_later: set[Value] = set()
    read_by_others = {v for stage in stages if stage.program is not None for v in stage.program.reads}
    read_by_others.update(n.inputs[0] for n in nodes if isinstance(n.op, Gather))
    for stage in reversed(stages):
        maps = [*stage.maps_read(), *(v for t in stage.targets for v in t.node.outputs if v.is_map)]
        stage.last_maps = [v for v in dict.fromkeys(maps) if v not in read_later]
        for t in reversed(stage.targets) if stage.program is None else ():
            stage.last_reads[t.node.serial] = [
                v for v in t.node.maps if v not in read_later and v not in read_by_others
            ]
            read_later.update(t.node.maps)
        read_later.update(stage.last_maps)
    return stages


def compute_vector(value: Value, frame: Frame) -> None:
    """Compute a vector with ordinary autograd, from results of segments that have run."""
    if value.is_map or value in frame.vectors:
        return
    ledger = frame.step.ledger
    if frame.has_streamed(value):
        return
    for node in ancestors([value], frame):
        op = node.op
        if any(map(frame.has_streamed, node.outputs)):
            continue
        if isinstance(op, Captured):
            (v,) = node.outputs
            if v in frame.bindings.captures:  # a rehearsal leaves some out
                frame.vectors[v] = with_requires_grad(frame.bindings.captures[v].tensor, v.requires_grad)
        elif isinstance(op, Gather):
            gather_map(node, frame)
        elif isinstance(op, Chain):
            run_links(node, op, frame)
        elif isinstance(op, (VectorOp, Barrier)):
            with watched(ledger), frame.fetch_streamed((-1, node.serial), node.inputs):
                call_operator(node, frame)
                if ledger is not None:
                    for v in node.outputs:
                        ledger.hook_gradients(frame.vector(v), {frame.vector(i).grad_fn for i in node.inputs})


def run_links(node: Node, op: Chain, frame: Frame) -> None:
    """Run a chain; the segments of a link are prepared once."""
    plan = frame.chains.get(node.serial) or kept_chain(op)
    link_plan, step = Plan(plan.segments), frame.step
    queue, prepared = make_queue(link_plan, step), dict[Body, Prepared]()

    def run(body: Body, link: Frame) -> None:
        found = prepared.get(body)
        if found is None:
            found = Prepared.of(link_plan, body.nodes, FIRST_LINK_PLACE)
            if body is op.body:
                prepared[body] = found
        found = replace(found, below=link.bindings.captures)
        run_stages(found, replace(link, streams=make_streams(found, False, link)), queue)

    turn = nullcontext() if step.rehearsal is None else step.rehearsal.turn((CHAIN, "forward"))
    with turn, watched(None if step.rehearsal is None else step.ledger):
        run_chain(node, frame, plan, run)


def kept_chain(op: Chain) -> ChainPlan:
    """Return a plan that keeps all links of a chain, for a plan that has none for it."""
    return ChainPlan(0, op.count, 0, op.count, kept_segments(op.body.nodes), op.body.path)


def call_operator(node: Node, frame: Frame) -> None:
    op = node.op
    assert isinstance(op, (VectorOp, Barrier))
    grad = any(v.requires_grad for v in node.outputs)
    with torch.set_grad_enabled(grad), without_autocast(node.outputs[0].autocast_type):
        result = op.run([frame.vector(v) for v in node.inputs])
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    for v, t in zip(node.outputs, tensors, strict=True):
        frame.vectors[v] = t
        if frame.step.watch is not None:
            frame.step.watch.check(node, t)


def gather_map(node: Node, frame: Frame) -> None:
    (source,) = node.inputs
    tensor = whole_map(source, frame)
    if source in frame.boundaries:
        # A copy: the user may write into the result, and segments read the boundary again.
        with watched(frame.step.ledger):
            tensor = copy_like(tensor, source.fake)
    frame.vectors[node.outputs[0]] = tensor
