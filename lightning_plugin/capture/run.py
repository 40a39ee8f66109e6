"""From a recording to values: choose a plan, have it run, and let happen what was deferred.

[Note: engines] A plan is made for all that runs at once, by one budget. So nodes of calls with other options run one
part after the other. Parts meet in vectors, which the first part hands to the next as ordinary tensors. A map is never
whole, so what reads a map belongs to the call that made it; where two such calls meet in maps, they are refused. What
no call has recorded and reads no map of a call runs with whatever part comes to it.

[Note: buffers] A train-mode BatchNorm moves its running statistics when it is called. Recorded, it moves them when the
batch's statistics are known, which may be much later, or never, where the result is dropped. So such a buffer *awaits*
its update: until then it is a tensor of a class of its own, whose first operation, whatever it is (a copy, a reset, a
``state_dict``), first runs the recording. Nobody can see the buffer as it was before, and no update is lost. When the
update has happened, or the run of the recording has failed, the very same tensor is an ordinary one again.

[Note: checkpoint] A block in `torch.utils.checkpoint` runs again in backward, so that plain PyTorch moves the running
statistics of a BatchNorm within it twice. What is recorded of it does not run again. So a backward pass that comes to a
result which was computed from the statistics has them moved once more, by the values that they were moved by before:
block by block from the last one, in a block in the order of the user's code. Where PyTorch runs a block again all the
same, since a value was read within it, that moves nothing.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.session import Engine, Session, bound, forget_modules
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.graph import Effect, Node, Recording, Value, ancestors, gathered
from lightning_plugin.private import current_pass, tree_leaves
from lightning_plugin.program.fixed import fixed
from lightning_plugin.progress import profiler_range


class AwaitingBuffer(Tensor):
    """A buffer whose update is recorded, in a session, and has not happened yet."""

    _session: Session

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        settle_buffers((args, kwargs))
        return func(*args, **(kwargs or {}))


def await_update(buffer: Tensor, session: Session) -> None:
    """From now on a buffer awaits its update by a recording. One of a class of the user's stays what it is."""
    if type(buffer) is Tensor:
        buffer.__class__ = AwaitingBuffer
    if isinstance(buffer, AwaitingBuffer):
        buffer._session = session


def restore_buffers(effects: Iterable[Effect]) -> None:
    """Make the buffers that effects write ordinary tensors again: their update is about to happen."""
    for buffer in (b for effect in effects for b in effect.writes):
        if isinstance(buffer, AwaitingBuffer):
            del buffer._session
            buffer.__class__ = Tensor  # type: ignore[assignment]


def settle_buffers(tree: Any, within: Session | None = None) -> None:
    """Have the updates happen that buffers among some arguments await. An update that the recording ``within`` will
    make itself is awaited still; a recording of which somebody holds results becomes part of it."""
    for t in tree_leaves(tree):
        if not isinstance(t, AwaitingBuffer):
            continue
        session = t._session.root()
        if within is not None and (session is within or any(ref() is not None for ref in session.pending)):
            within.absorb(session)
        else:
            run(session)
            session.forget()


def discard_effects(session: Session) -> None:
    """Drop the effects of a recording that is only looked at and never run."""
    restore_buffers(session.effects)
    session.effects.clear()


def next_part(session: Session, values: Sequence[Value]) -> tuple[Engine | None, Sequence[Value], bool]:
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
        needs[node].update(*(needs[made] for made in pending_producers(node.inputs, session)))
    crossing = (v for n in nodes for v in n.vectors if v.node is not None and kinds.get(v.node) not in (None, kinds[n]))
    left = [v for v in dict.fromkeys((*crossing, *values)) if v not in session.vectors]
    # Some come from the calls of one module alone, since what is recorded points backwards only.
    alone = {v: needs[made] for v in left for made in pending_producers([v], session) if len(needs[made]) == 1}
    now = next(iter(alone.values()))
    return next(iter(now)), [v for v, needed in alone.items() if needed == now], True


def pending_producers(values: Iterable[Value], session: Session) -> list[Node]:
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


def run(session: Session, wanted: Sequence[Value] = ()) -> list[Tensor]:
    """Compute the wanted values, and with them everything small that is waiting and every effect: under one plan, or
    under one for each of the options that calls have; see [Note: engines]."""
    waiting = [(ref, t) for ref in session.pending if (t := ref()) is not None]
    session.pending = [ref for ref, _ in waiting]
    pending = [t._value for _, t in waiting if isinstance(bound(t._fake), Value)]
    wanted = [v if not v.is_map else gathered(v) for v in wanted]
    values = [v for v in dict.fromkeys((*pending, *wanted)) if v not in session.vectors]
    values += [v for e in session.effects if not e.dormant for v in e.values]
    restore_buffers(session.effects)
    with torch.inference_mode(False), profiler_range("step"):
        default, more = session.engine, bool(values)
        try:
            while more:
                session.engine, now, more = next_part(session, values)
                recording = session.recorded(now)
                run_recording(recording, session)
                if session.engine is not None:
                    session.engine.watch_loss(recording, now, session.vectors)
        except BaseException:
            for effect in session.effects:  # as in PyTorch, where a forward that failed has moved nothing
                effect.dormant = True
            raise
        finally:
            session.engine = default
            forget_modules()
        apply_effects(session)
        hook_recomputed_effects(session, values)
    return [session.vectors[v] for v in wanted]


@torch.no_grad()
def apply_effects(session: Session) -> None:
    """Apply the effects whose values are known."""
    waiting = []
    while session.effects:
        effect = session.effects.pop(0)
        if all(v in session.vectors for v in effect.values):
            tensors = [session.vectors[v] for v in effect.values]
            effect.run(tensors)
            if effect.block is not None:
                effect.tensors = [t.detach() for t in tensors]
                session.repeats.append(effect)
        else:
            waiting.append(effect)
    session.effects = waiting


def hook_recomputed_effects(session: Session, values: Sequence[Value]) -> None:
    """Register hooks that apply the effects of checkpointed blocks again in backward; see [Note: checkpoint]."""
    for v in values if session.repeats else ():
        if (result := session.vectors[v]).grad_fn is not None:
            behind = {made for node in ancestors([v]) for made in node.outputs}
            effects = [e for e in session.repeats if e.values[0] in behind]
            result.register_hook(partial(repeat_effects, effects, session.recomputed))


@torch.no_grad()
def repeat_effects(effects: Sequence[Effect], recomputed: Container[Hashable], gradient: Tensor) -> None:
    """Apply the effects behind a result again, once in a pass."""
    now = current_pass()
    blocks = [list(group) for block, group in groupby(effects, lambda e: e.block) if block in recomputed]
    for effect in (e for block in reversed(blocks) for e in block if e.repeated != now):
        effect.repeated = now
        how: dict[str, float] = {}
        if (norm := effect.norm) is not None and norm.num_batches_tracked is not None:
            count = float(norm.num_batches_tracked.add_(1))
            how = {"momentum": 1 / count} if norm.momentum is None else {}
        effect.run(effect.tensors, **how)


def run_recording(recording: Recording, session: Session) -> None:
    """Run what was recorded in the order of a plan."""
    check_versions(recording)
    engine = session.engine
    with profiler_range("plan"):
        plan = fixed(recording.nodes, None) if engine is None else engine.choose(recording)
    step = Step() if engine is None else engine.begin_step(plan, recording)
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
