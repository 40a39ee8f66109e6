"""From a recording to values: choose a plan, have it run, and let happen what was deferred.

[Note: engines] A plan is made for all that runs at once, by one budget. So nodes of calls with other options run one
part after the other. Parts meet in vectors, which the first part hands to the next as ordinary tensors. A map is never
whole, so what reads a map belongs to the call that made it; where two such calls meet in maps, they are refused. What
no call has recorded and reads no map of a call runs with whatever part comes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_plugin.capture.buffers import ordinary
from lightning_plugin.capture.paths import forget_modules
from lightning_plugin.capture.repeats import InBackward, Repeat
from lightning_plugin.capture.session import Engine, Session
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.graph import Node, Value, ancestors
from lightning_plugin.program.fixed import fixed
from lightning_plugin.progress import ranged
from lightning_plugin.recording import Recording, gathered


def part(session: Session, values: Sequence[Value]) -> tuple[Engine | None, Sequence[Value], bool]:
    """The engine that runs next, the values that it computes, and whether others are left for later."""
    if not session.calls:
        return session.engine, values, False
    nodes = ancestors(values, session.vectors)
    kinds: dict[Node, Engine | None] = {}
    found: list[Engine] = []
    for node in nodes:
        kind = engine_of(node, session, kinds)
        same = (other for other in found if kind is not None and other.options == kind.options)
        kinds[node] = kind = next(same, kind)
        if kind is not None and kind not in found:
            found.append(kind)
    if len(found) < 2:
        return found[0] if found else session.engine, values, False

    needs: dict[Node, set[Engine]] = {}
    for node in nodes:
        kind = kinds[node]
        needs[node] = set() if kind is None else {kind}
        needs[node].update(*(needs[made] for made in makers(node.inputs, session)))
    crossing = (v for n in nodes for v in n.vectors if v.node is not None and kinds.get(v.node) not in (None, kinds[n]))
    left = [v for v in dict.fromkeys((*crossing, *values)) if v not in session.vectors]
    # Some come from the calls of one module alone, since what is recorded points backwards only.
    alone = {v: needs[made] for v in left for made in makers([v], session) if len(needs[made]) == 1}
    now = next(iter(alone.values()))
    return next(iter(now)), [v for v, needed in alone.items() if needed == now], True


def makers(values: Iterable[Value], session: Session) -> list[Node]:
    """The nodes that have to run for some values."""
    return [v.node for v in values if v.node is not None and v not in session.vectors]


def engine_of(node: Node, session: Session, kinds: dict[Node, Engine | None]) -> Engine | None:
    """The engine of the call that recorded a node, or the maps that it reads."""
    if not node.maps:
        return None
    own = [call.engine for call in session.calls if node in call][:1]
    made = [kind for v in node.maps if v.node in kinds and (kind := kinds[v.node]) is not None]
    met = [*made, *own]
    for other in met[1:]:
        if other.options != met[0].options:
            raise RecordingError(
                f"{node.label} reads maps of a TiledModule with {met[0].options} and of one with {other.options}: they "
                "would be run together, under one plan. Take the first map whole where it fits (materialize(x)), give "
                "both modules the same options, or wrap both in one TiledModule."
            )
    return met[0] if met else None


def execute(session: Session, wanted: Sequence[Value], pending: Sequence[Value]) -> list[Tensor]:
    """Compute values, and with them everything small that is waiting and every effect: under one plan, or under one for
    each of the options that calls have; see [Note: engines]."""
    wanted = [v if not v.is_map else gathered(v) for v in wanted]
    values = [v for v in dict.fromkeys((*pending, *wanted)) if v not in session.vectors]
    values += [v for e in session.effects if not e.dormant for v in e.values]
    ordinary(b for e in session.effects for b in e.writes)
    with forget_modules(), torch.inference_mode(False), ranged("step"):
        default, waiting = session.engine, bool(values)
        try:
            while waiting:
                session.engine, now, waiting = part(session, values)
                recording = session.recorded(now)
                run(recording, session)
                if session.engine is not None:
                    session.engine.look(recording, now, session.vectors)
        except BaseException:
            for effect in session.effects:  # as in PyTorch, where a forward that failed has moved nothing
                effect.dormant = True
            raise
        finally:
            session.engine = default
        happen(session)
        again_in_backward(session, values)
    return [session.vectors[v] for v in wanted]


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
        if (result := session.vectors[v]).grad_fn is not None:
            behind = {made for node in ancestors([v]) for made in node.outputs}
            result.register_hook(InBackward([r for r in session.repeats if r.effect.values[0] in behind]))


def run(recording: Recording, session: Session) -> None:
    """Run what was recorded in the order of a plan."""
    check_versions(recording)
    engine = session.engine
    with ranged("plan"):
        plan = fixed(recording.nodes, None) if engine is None else engine.choose(recording)
    step = Step() if engine is None else engine.begin(plan, recording)
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
