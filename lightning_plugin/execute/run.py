"""A plan, run: segment by segment, and ordinary autograd does the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightning_plugin.errors import PlanError
from lightning_plugin.execute.function import run_segment
from lightning_plugin.execute.keep import Uses, keep, whole
from lightning_plugin.execute.leaves import as_used
from lightning_plugin.execute.rehearsal import REHEARSAL
from lightning_plugin.execute.room import Guard, leaves
from lightning_plugin.execute.segment import SegmentRun, real
from lightning_plugin.execute.store import Place
from lightning_plugin.execute.team import Team
from lightning_plugin.execute.transfer import Courier
from lightning_plugin.graph import Node, Value, ancestors
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import Barrier, Captured, Gather, Spread, VectorOp
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.program.fuse import pairs
from lightning_plugin.program.program import Program, Target, resolve


def run_plan(
    plan: Plan,
    nodes: Sequence[Node],
    ledger: Ledger | None = None,
    team: Team | None = None,
    folder: str | None = None,
) -> None:
    """Run forward, and leave in every vector a tensor whose ``grad_fn`` runs backward as the plan says."""
    stages = prepare(plan, nodes, ledger, team, folder)
    gathers = [n for n in nodes if isinstance(n.op, Gather)]
    try:
        for stage in stages:
            if ledger is not None:
                ledger.enter((stage.place, "forward"))
            stage.run()
            for node in gathers:
                if stage.makes(node.inputs[0]):
                    compute(node.outputs[0], ledger)
            for v in stage.last:
                if v.handle is not None:
                    v.handle.let_go()
                v.handle = v.real = None
        for node in nodes:
            for v in node.outputs:
                if not v.is_map:
                    compute(v, ledger)
        if ledger is not None:
            ledger.leave()
    finally:
        for node in nodes:
            for v in (*node.inputs, *node.outputs):
                if v.is_map:
                    v.handle = v.token = v.real = None


@dataclass(eq=False)
class Stage:
    """A segment with what it runs; ``last`` are the maps that no later segment reads."""

    plan: SegmentPlan
    targets: Sequence[Target]
    program: Program | None
    uses: Uses
    fused: Mapping[int, Node] = field(default_factory=dict)
    ledger: Ledger | None = None
    place: int = 0
    team: Team | None = None
    courier: Courier = field(default_factory=Courier)
    last: list[Value] = field(default_factory=list)

    def reads(self) -> list[Value]:
        if self.program is not None:
            return list(self.program.reads)
        return [v for t in self.targets for v in t.node.maps]

    def makes(self, value: Value) -> bool:
        return any(value in t.node.outputs for t in self.targets)

    def run(self) -> None:
        if self.program is None:
            with watched(self.ledger):
                self.run_kept([t.node for t in self.targets])
        else:
            self.run_tiled(self.program)

    def run_tiled(self, program: Program) -> None:
        for v in program.vectors:
            compute(v, self.ledger)
        for v in program.reads:
            assert v.node is not None
            if isinstance(v.node.op, Spread):
                compute(v.node.inputs[0], self.ledger)
        if self.plan.halo == "share" and self.team is not None:
            raise PlanError(
                f"segment {self.place} shares halos, so its tiles run in order and cannot be shared among ranks; use "
                'halo="recompute"'
            )
        at = Place(self.plan.tier, self.courier)
        run_segment(SegmentRun(program, self.plan, at, self.ledger, self.place, self.team))

    def run_kept(self, nodes: Sequence[Node]) -> None:
        guard = Guard(self.plan, nodes, self.ledger)
        for place, node in enumerate(nodes):
            partner = self.fused.get(node.serial)
            for v in node.inputs:
                if v.is_map:
                    if v.node is not None and isinstance(v.node.op, Spread):
                        compute(v.node.inputs[0], self.ledger)
                elif partner is None or v.node is not partner:
                    compute(v, self.ledger)
            keep(node, self.uses, self.fused, self.ledger)
            if self.ledger is not None:
                self.mark(node, place, self.ledger, guard)

    def mark(self, node: Node, place: int, ledger: Ledger, guard: Guard) -> None:
        """Let the ledger know when backward comes by, and what autograd makes there by itself, and have the budget
        looked at before."""
        who = (self.place, "backward")
        for v in node.outputs:
            if v.real is None or not v.real.requires_grad:
                continue
            if ledger.fakes:
                v.real.register_hook(lambda g: ledger.enter(who, goes_on=True))
                continue
            if guard.looks:
                v.real.register_hook(partial(guard, place=place))
                guard.leaves += leaves([i.real for i in node.inputs if i.real is not None])
            ledger.hook(v.real, [i.real for i in node.inputs if i.real is not None])


def prepare(
    plan: Plan,
    nodes: Sequence[Node],
    ledger: Ledger | None = None,
    team: Team | None = None,
    folder: str | None = None,
) -> list[Stage]:
    """The segments of a plan, and after which of them each map may go."""
    made: set[int] = set()
    stages = []
    uses = Uses(nodes)
    courier = Courier(any(s.ahead for s in plan.segments), REHEARSAL.get(), folder)
    for place, (segment, here) in enumerate(zip(plan.segments, resolve(plan, nodes), strict=True)):
        program = None if segment.keep else Program.build(here, lambda v: id(v) in made)
        fused = pairs([t.node for t in here], nodes) if segment.keep else {}
        stages.append(Stage(segment, here, program, uses, fused, ledger, place, team, courier))
        made.update(id(v) for t in here for v in t.node.outputs if v.is_map and (segment.keep or t.stored is not None))
    seen: set[int] = set()
    for stage in reversed(stages):
        touched = [*stage.reads(), *(v for t in stage.targets for v in t.node.outputs if v.is_map)]
        stage.last = [v for v in dict.fromkeys(touched) if id(v) not in seen]
        seen.update(id(v) for v in stage.last)
    return stages


def compute(value: Value, ledger: Ledger | None = None) -> None:
    """Bring a vector about with ordinary autograd; what it needs of maps has been computed by segments."""
    if value.is_map or value.real is not None:
        return
    for node in ancestors([value]):
        op = node.op
        if isinstance(op, Captured):
            node.outputs[0].real = as_used(op.tensor, node.outputs[0].requires_grad)
        elif isinstance(op, Gather):
            gather(node)
        elif isinstance(op, (VectorOp, Barrier)):
            with watched(ledger):
                call(node)
            if ledger is not None:
                for v in node.outputs:
                    ledger.hook(real(v), [real(i) for i in node.inputs])


def call(node: Node) -> None:
    op = node.op
    assert isinstance(op, (VectorOp, Barrier))
    grad = any(v.requires_grad for v in node.outputs)
    with torch.set_grad_enabled(grad), torch.autocast(_kind(node), enabled=False):
        result = op.run([real(v) for v in node.inputs])
    flat = torch.utils._pytree.tree_leaves(result)
    tensors = [t for t in flat if isinstance(t, Tensor)]
    for v, t in zip(node.outputs, tensors, strict=True):
        v.real = t


def _kind(node: Node) -> str:
    kind = node.outputs[0].device.type
    return kind if torch.amp.is_autocast_available(kind) else "cpu"


def gather(node: Node) -> None:
    (source,) = node.inputs
    tensor = whole(source)
    # The user may write into the result; a boundary that others will read must not change under them.
    node.outputs[0].real = tensor.clone() if source.handle is not None else tensor
