"""From a recording to values: choose a plan, have it run, and let happen what was deferred."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_plugin.capture.buffers import ordinary
from lightning_plugin.capture.parts import part
from lightning_plugin.capture.paths import forget_modules
from lightning_plugin.capture.repeats import InBackward, Repeat
from lightning_plugin.capture.session import Session
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.frame import Frame
from lightning_plugin.execute.run import run_plan
from lightning_plugin.execute.step import Step
from lightning_plugin.graph import Value, ancestors
from lightning_plugin.program.fixed import fixed
from lightning_plugin.recording import Recording, gathered


def execute(session: Session, wanted: Value | None, pending: Sequence[Value]) -> Tensor:
    """Compute a value, and with it everything small that is waiting and every effect: under one plan, or under one for
    each of the settings that calls have; see [Note: settings] in `parts`."""
    values = [*pending, *(v for e in session.effects if not e.dormant for v in e.values)]
    if wanted is not None:
        values.append(wanted if not wanted.is_map else gathered(wanted))
    ordinary(b for e in session.effects for b in e.writes)
    with forget_modules(), torch.inference_mode(False):
        default, waiting = session.settings, True
        try:
            while waiting:
                session.settings, now, waiting = part(session, values)
                recording = session.recorded(now)
                run(recording, session)
                if session.settings is not None:
                    session.settings.look(recording, now, session.vectors)
        except BaseException:
            for effect in session.effects:  # as in PyTorch, where a forward that failed has moved nothing
                effect.dormant = True
            raise
        finally:
            session.settings = default
        happen(session)
        again_in_backward(session, values)
    return session.vectors[values[-1]] if wanted is not None else torch.empty(0)


@torch.no_grad()
def happen(session: Session) -> None:
    """Have the effects happen whose values are known."""
    waiting = []
    while session.effects:
        effect = session.effects.pop(0)
        if all(v in session.vectors for v in effect.values):
            tensors = [session.vectors[v] for v in effect.values]
            effect.run(tensors)
            if effect.block is not None:
                session.repeats.append(Repeat(effect, [t.detach() for t in tensors]))
        else:
            waiting.append(effect)
    session.effects = waiting


def again_in_backward(session: Session, values: Sequence[Value]) -> None:
    """Have effects within checkpointed blocks happen again in backward; see [Note: checkpoint] in `repeats`."""
    for v in values if session.repeats else ():
        if (result := session.vectors[v]).requires_grad:
            behind = {made for node in ancestors([v]) for made in node.outputs}
            result.register_hook(InBackward([r for r in session.repeats if r.effect.values[0] in behind]))


def run(recording: Recording, session: Session) -> None:
    """Run what was recorded in the order of a plan."""
    check_versions(recording)
    settings = session.settings
    plan = fixed(recording.nodes, None) if settings is None else settings.choose(recording)
    step = Step() if settings is None else settings.begin(plan, recording)
    run_plan(plan, recording.nodes, Frame(recording.bindings, session.vectors, step))


def check_versions(recording: Recording) -> None:
    """Refuse tensors that are not any more what they were when an operator that is still to run was recorded."""
    bindings = recording.bindings
    for v in dict.fromkeys(v for n in recording.nodes for v in n.inputs):
        given = bindings.images.get(v) or bindings.captures.get(v)
        if given is not None and given.changed:
            users = [n.label for n in recording.nodes if v in n.inputs]
            what = "an image" if v in bindings.images else "a tensor"
            raise RecordingError(
                f"{what} of shape {v.shape} was changed in place after {users[0]} used it and before "
                "that operator ran. Change it earlier, use the out-of-place form, or take the value of what was "
                "recorded first (loss.item(), materialize(x))."
            )
