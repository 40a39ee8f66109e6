"""From a recording to values: choose a plan, have it run, and let happen what was deferred."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_plugin.capture.buffers import ordinary
from lightning_plugin.capture.paths import forget_modules
from lightning_plugin.capture.session import Session
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.run import run_plan
from lightning_plugin.execute.segment import real
from lightning_plugin.graph import Node, Value, ancestors
from lightning_plugin.ops import Captured, Gather, Source
from lightning_plugin.program.fixed import fixed


def execute(session: Session, wanted: Value | None, pending: Sequence[Value]) -> Tensor:
    """Compute a value, and with it everything small that is waiting and every effect, under one plan."""
    values = [*pending, *(v for e in session.effects if not e.dormant for v in e.values)]
    if wanted is not None:
        values.append(wanted if not wanted.is_map else gathered(wanted, session))
    ordinary(b for e in session.effects for b in e.writes)
    with forget_modules(), torch.inference_mode(False):
        try:
            run(ancestors(values), session)
        except BaseException:
            for effect in session.effects:  # as in PyTorch, where a forward that failed has moved nothing
                effect.dormant = True
            raise
        happen(session)
    return real(values[-1]) if wanted is not None else torch.empty(0)


@torch.no_grad()
def happen(session: Session) -> None:
    """Have the effects happen whose values are known."""
    waiting = []
    while session.effects:
        effect = session.effects.pop(0)
        if all(v.real is not None for v in effect.values):
            effect.run([real(v) for v in effect.values])
        else:
            waiting.append(effect)
    session.effects = waiting


def gathered(value: Value, session: Session) -> Value:
    node = Node(Gather(), (value,), (), "gather", value.node.path if value.node else "")
    out = Value(value.fake, None, value.requires_grad, node)
    node.outputs = (out,)
    session.nodes.append(node)
    return out


def run(nodes: Sequence[Node], session: Session) -> None:
    """Run nodes in the order of a plan."""
    check_versions(nodes)
    settings = session.settings
    if settings is None:
        run_plan(fixed(nodes, None), nodes)
    else:
        plan = settings.choose(nodes)
        run_plan(plan, nodes, settings.begin(plan, nodes), settings.team, settings.folder)


def check_versions(nodes: Sequence[Node]) -> None:
    """Refuse tensors that are not any more what they were when an operator that is still to run was recorded."""
    given = {id(n): n for node in nodes for v in node.inputs if (n := v.node) is not None}
    for node in given.values():
        op = node.op
        if isinstance(op, (Captured, Source)) and op.changed:
            users = [n.label for n in nodes if node.outputs[0] in n.inputs]
            what = "an image" if isinstance(op, Source) else "a tensor"
            raise RecordingError(
                f"{what} of shape {node.outputs[0].shape} was changed in place after {users[0]} used it and before "
                "that operator ran. Change it earlier, use the out-of-place form, or take the value of what was "
                "recorded first (loss.item(), materialize(x))."
            )
