"""From a recording to values: plan, run segment by segment, let ordinary autograd do the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_plugin.errors import PlanError, RecordingError
from lightning_plugin.execute.program import Program, Target
from lightning_plugin.execute.segment import GatherFunction, SegmentRun
from lightning_plugin.graph import Node, Value, ancestors
from lightning_plugin.plan import Plan
from lightning_plugin.policy import choose
from lightning_plugin.record import Session, forget_modules
from lightning_plugin.rules.base import Barrier, Captured, Gather, ReduceOp, VectorOp


def execute(session: Session, wanted: Value | None, pending: Sequence[Value]) -> Tensor:
    """Compute a value, and with it everything small that is waiting and every effect, under one plan."""
    effects, session.effects = session.effects, []
    values = [*pending, *(v for e in effects for v in e.values)]
    if wanted is not None:
        values.append(wanted if not wanted.is_map else gathered(wanted))
    with forget_modules(), torch.inference_mode(False):
        run(ancestors(values), session)
        with torch.no_grad():
            for effect in effects:
                effect.run([_known(v) for v in effect.values])
    return _known(values[-1]) if wanted is not None else torch.empty(0)


def gathered(value: Value) -> Value:
    node = Node(Gather(), (value,), (), "gather", value.node.path if value.node else "")
    out = Value(value.fake, None, value.requires_grad, node)
    node.outputs = (out,)
    return out


def run(nodes: Sequence[Node], session: Session) -> None:
    """Run nodes in the order of a plan."""
    check_versions(nodes)
    plan = choose(nodes, session.settings)
    if session.settings is not None:
        session.settings.planned(plan)
    targets = resolve(plan, nodes)
    made: list[Value] = []
    try:
        for segment, made_here in zip(plan.segments, targets, strict=True):
            program = Program.build(made_here, lambda v: v.handle is not None)
            for v in [*program.vectors, *(r.node.inputs[0] for r in program.reads if r.node and r.node.inputs)]:
                compute(v)
            SegmentRun(program, segment.forward, segment.backward).apply()
            made.extend(t.stored for t in made_here if t.stored is not None)
        for node in nodes:
            for v in node.outputs:
                if not v.is_map:
                    compute(v)
    finally:
        for v in made:
            v.handle = v.token = None


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


def compute(value: Value) -> None:
    """Bring a vector about with ordinary autograd; what it needs of maps has been computed by segments."""
    if value.is_map or value.real is not None:
        return
    for node in ancestors([value]):
        op = node.op
        if isinstance(op, Captured):
            node.outputs[0].real = op.tensor
        elif isinstance(op, Gather):
            gather(node)
        elif isinstance(op, (VectorOp, Barrier)):
            call(node)


def call(node: Node) -> None:
    op = node.op
    assert isinstance(op, (VectorOp, Barrier))
    grad = any(v.requires_grad for v in node.outputs)
    with torch.set_grad_enabled(grad), torch.autocast(_kind(node), enabled=False):
        result = op.run([_known(v) for v in node.inputs])
    flat = torch.utils._pytree.tree_leaves(result)
    tensors = [t for t in flat if isinstance(t, Tensor)]
    for v, t in zip(node.outputs, tensors, strict=True):
        v.real = t


def _kind(node: Node) -> str:
    kind = node.outputs[0].device.type
    return kind if torch.amp.is_autocast_available(kind) else "cpu"


def gather(node: Node) -> None:
    (source,) = node.inputs
    if source.handle is None:
        raise AssertionError(f"{source.label} should have been stored")
    out = node.outputs[0]
    with torch.set_grad_enabled(out.requires_grad):
        out.real = GatherFunction.apply(source, source.handle, source.token)


def _known(value: Value) -> Tensor:
    if value.real is None:
        raise AssertionError(f"{value.label} was not computed")
    return value.real


def check_versions(nodes: Sequence[Node]) -> None:
    for node in nodes:
        op = node.op
        if isinstance(op, Captured) and op.version >= 0 and not op.tensor.is_inference() and op.tensor._version != op.version:
            raise RecordingError(
                f"a tensor of shape {tuple(op.tensor.shape)} was changed in place after a recorded operator used it and "
                "before that operator ran. Change it earlier, use the out-of-place form, or take the value of what was "
                "recorded first (loss.item(), materialize(x))."
            )
