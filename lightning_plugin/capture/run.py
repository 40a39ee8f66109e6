"""From a recording to values: choose a plan, have it run, and let happen what was deferred.

[Note: settings] A plan is made for all that runs at once, by one budget. So nodes of calls with other settings run one
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
from lightning_plugin.capture.session import ExecutionSettings, Session
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.graph import Node, Value, ancestors
from lightning_plugin.program.fixed import fixed
from lightning_plugin.progress import ranged
from lightning_plugin.recording import Recording, gathered


def part(session: Session, values: Sequence[Value]) -> tuple[ExecutionSettings | None, Sequence[Value], bool]:
    """The settings by which values, or what has to run before them, run next; which values do; and whether others are
    left for later."""
    if not session.calls:
        return session.settings, values, False
    nodes = ancestors(values, session.vectors)
    kinds: dict[Node, ExecutionSettings | None] = {}
    found: list[ExecutionSettings] = []
    for node in nodes:
        kind = settings_of(node, session, kinds)
        kinds[node] = kind = next((other for other in found if kind is not None and other.same(kind)), kind)
        if kind is not None and kind not in found:
            found.append(kind)
    if len(found) < 2:
        return found[0] if found else session.settings, values, False

    needs: dict[Node, set[ExecutionSettings]] = {}
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


def settings_of(node: Node, session: Session, kinds: dict[Node, ExecutionSettings | None]) -> ExecutionSettings | None:
    """The settings of the call that recorded a node, or the maps that it reads."""
    if not node.maps:
        return None
    own = [call.settings for call in session.calls if node in call][:1]
    made = [kind for v in node.maps if v.node in kinds and (kind := kinds[v.node]) is not None]
    met = [*made, *own]
    for other in met[1:]:
        if not other.same(met[0]):
            raise RecordingError(
                f"{node.label} reads maps of a TiledModule with {met[0]} and of one with {other}: they would be run "
                "together, under one plan. Take the first map whole where it fits (materialize(x)), give both modules "
                "the same options, or wrap both in one TiledModule."
            )
    return met[0] if met else None


def execute(session: Session, wanted: Value | None, pending: Sequence[Value]) -> Tensor:
    """Compute a value, and with it everything small that is waiting and every effect: under one plan, or under one for
    each of the settings that calls have; see [Note: settings]."""
    values = [*pending, *(v for e in session.effects if not e.dormant for v in e.values)]
    if wanted is not None:
        values.append(wanted if not wanted.is_map else gathered(wanted))
    ordinary(b for e in session.effects for b in e.writes)
    with forget_modules(), torch.inference_mode(False), ranged("step"):
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
        if (result := session.vectors[v]).grad_fn is not None:
            behind = {made for node in ancestors([v]) for made in node.outputs}
            result.register_hook(InBackward([r for r in session.repeats if r.effect.values[0] in behind]))


def run(recording: Recording, session: Session) -> None:
    """Run what was recorded in the order of a plan."""
    check_versions(recording)
    settings = session.settings
    with ranged("plan"):
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
