"""Execution of a recording: choose a plan, run it, and apply deferred effects.

[Note: engines] A plan covers the nodes that run together, under one budget. Nodes of calls with different options
therefore run in several parts, one after the other. A part hands vectors to the next as ordinary tensors. A node that
reads a map belongs to the call that made the map, since a map is never whole; a node that reads maps of two calls with
different options is refused. A node outside of all calls that reads no map of a call runs with the first part that
needs it.

[Note: buffers] In plain PyTorch a BatchNorm in train mode updates its running statistics when it is called. Recorded,
it updates them when the batch's statistics are known: later, or never if the result is dropped. Until then the buffer
*awaits* its update as an `AwaitingBuffer`: its first operation (a copy, a reset, a ``state_dict``) runs the recording.
So no code sees the old statistics, and no update is lost. After the update, or after a run that failed, the same tensor
object is an ordinary tensor again.

[Note: checkpoint] A block in `torch.utils.checkpoint` runs again in backward, so that plain PyTorch updates the running
statistics of a BatchNorm within it twice. Recorded nodes of the block do not run again. So a backward pass through a
result that depends on the statistics repeats the update with the same values: blocks from the last to the first,
updates of a block in the order of the user's code. If PyTorch does run the block again, since a value was read within
it, that run updates nothing. What the engine computes within a block, which may be more than the block recorded, is
not part of it: it saves nothing there, so that both runs of the block save the same.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.alias import has_value
from lightning_plugin.capture.session import Engine, Session, drop_module_names
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.graph import Effect, Node, Recording, Value, ancestors
from lightning_plugin.private import (
    BatchNormBase,
    current_pass,
    outside_checkpoint,
    saved_tensor_hooks_allowed,
    tree_leaves,
)
from lightning_plugin.program.fixed import fixed_plan
from lightning_plugin.progress import profiler_range


class AwaitingBuffer(Tensor):
    """Buffer whose update is recorded and not applied yet; see [Note: buffers]."""

    _session: Session

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        run_awaited_updates((args, kwargs))
        return func(*args, **(kwargs or {}))


def await_update(buffer: Tensor, session: Session) -> None:
    """Make a buffer await its update by a session; a buffer of a subclass of the user's stays as it is."""
    if type(buffer) is Tensor:
        buffer.__class__ = AwaitingBuffer
    if isinstance(buffer, AwaitingBuffer):
        buffer._session = session


def add_effect(session: Session, effect: Effect, buffers: Iterable[Value]) -> None:
    """Add an effect to a session; the buffers that it writes await it."""
    for v in buffers:
        await_update(session.mark_written(v), session)
    session.effects.append(effect)


def restore_buffers(effects: Iterable[Effect]) -> None:
    """Make the buffers that effects write ordinary tensors again."""
    for buffer in (b for effect in effects for b in effect.writes):
        if isinstance(buffer, AwaitingBuffer):
            del buffer._session
            buffer.__class__ = Tensor  # type: ignore[assignment]


def run_awaited_updates(tree: Any, within: Session | None = None) -> None:
    """Apply the updates that buffers in a tree await, by running their sessions.

    Args:
        tree: Arguments of a call.
        within: The session that records the call. Its own updates stay pending. A session with live results is merged
            into it instead of run.
    """
    for t in tree_leaves(tree):
        if not isinstance(t, AwaitingBuffer):
            continue
        session = t._session.root()
        if within is not None and (session is within or pending_vectors(session)):
            within.merge(session)
        else:
            run(session)
            session.drop_unreachable()


def discard_effects(session: Session, since: int = -1) -> None:
    """Drop the effects that a session has recorded since a serial number: its calls are refused, or only planned."""
    restore_buffers(session.effects)
    kept = [e for e in session.effects if e.serial < since]
    for effect in session.effects:
        if effect not in kept:
            suspend(effect)
        else:
            for buffer in effect.writes:
                await_update(buffer, session)
    session.effects = kept


def suspend(effect: Effect) -> None:
    """Make an effect dormant. Its BatchNorm, which counted the batch when it was called, counts it when the effect is
    applied after all."""
    if not effect.dormant:
        effect.dormant = True
        count_batch(effect.norm, -1)


def count_batch(norm: BatchNormBase | None, by: int) -> None:
    """Correct the number of batches that a BatchNorm has counted."""
    if norm is not None and norm.num_batches_tracked is not None:
        with torch.no_grad():
            norm.num_batches_tracked.add_(by)


def next_part(session: Session, values: Sequence[Value]) -> tuple[Engine | None, Sequence[Value], bool]:
    """Return the engine that runs next, the values that it computes, and True if other values remain; see
    [Note: engines]."""
    if all(call.engine is session.engine for call in session.calls):
        return session.engine, values, False
    nodes = ancestors(values, session.vectors)
    engine_by_node: dict[Node, Engine | None] = {}
    engines: list[Engine] = []
    for node in nodes:
        engine = engine_of(node, session, engine_by_node)
        same = (other for other in engines if engine is not None and other.options == engine.options)
        engine_by_node[node] = engine = next(same, engine)
        if engine is not None and engine not in engines:
            engines.append(engine)
    if len(engines) < 2:
        return engines[0] if engines else session.engine, values, False

    needs: dict[Node, set[Engine]] = {}
    for node in nodes:
        engine = engine_by_node[node]
        needs[node] = set() if engine is None else {engine}
        needs[node].update(*(needs[producer] for producer in pending_producers(node.inputs, session)))
    crossing = (
        v
        for n in nodes
        for v in n.vectors
        if v.node is not None and engine_by_node.get(v.node) not in (None, engine_by_node[n])
    )
    remaining = [v for v in dict.fromkeys((*crossing, *values)) if v not in session.vectors]
    # At least one value depends on a single engine, since nodes depend on earlier nodes only.
    ready = {v: needs[node] for v in remaining for node in pending_producers([v], session) if len(needs[node]) == 1}
    first = next(iter(ready.values()))
    return next(iter(first)), [v for v, needed in ready.items() if needed == first], True


def pending_producers(values: Iterable[Value], session: Session) -> list[Node]:
    """Return the nodes that make some values and have not run."""
    return [v.node for v in values if v.node is not None and v not in session.vectors]


def engine_of(node: Node, session: Session, engine_by_node: dict[Node, Engine | None]) -> Engine | None:
    """Return the engine of a node: that of the maps that it reads, or of the call that recorded it; None if any engine
    may run it.

    Args:
        node: The node.
        session: The session.
        engine_by_node: The engines of earlier nodes.
    """
    if not node.maps:
        return None
    engines = [engine for v in node.maps if v.node in engine_by_node and (engine := engine_by_node[v.node]) is not None]
    engines += [call.engine for call in session.calls if node in call][:1]
    for other in engines[1:]:
        if other.options != engines[0].options:
            raise RecordingError(
                f"{node.label} reads maps of a TiledModule with {engines[0].options} and of one with {other.options}: "
                "they would be run together, under one plan. Take the first map whole where it fits "
                "(materialize(x)), give both modules the same options, or wrap both in one TiledModule."
            )
    return engines[0] if engines else None


def run(session: Session, wanted: Sequence[Value] = ()) -> list[Tensor]:
    """Compute the wanted values, all pending vectors and all effects, under one plan for each of the calls' options;
    see [Note: engines]."""
    wanted = [v if not v.is_map else session.gathered(v) for v in wanted]
    values = [v for v in dict.fromkeys((*pending_vectors(session), *wanted)) if v not in session.vectors]
    asked = set(values)
    values += [v for e in session.effects if not e.dormant for v in e.values]
    restore_buffers(session.effects)
    with torch.inference_mode(False), saved_tensor_hooks_allowed(), outside_checkpoint(), profiler_range("step"):
        default, more = session.engine, bool(values)
        try:
            while more:
                session.engine, now, more = next_part(session, values)
                recording = session.recording_of(now)
                if session.engine is not None:
                    recording = recording.with_parameters(session.engine.module_parameters, session.device)
                run_recording(recording, session)
                if session.engine is not None:
                    session.engine.watch_loss(recording, [v for v in now if v in asked], session.vectors)
        except BaseException:
            for effect in session.effects:  # as in PyTorch, where a failed forward updates nothing
                suspend(effect)
            raise
        finally:
            session.engine = default
            drop_module_names()
        apply_effects(session)
        hook_recomputed_effects(session, values)
    results = [session.vectors[v] for v in wanted]
    session.drop_unsound_results()
    return results


def pending_vectors(session: Session) -> list[Value]:
    """Return the vectors of the lazy tensors that the user's code holds."""
    return [v for t in session.alive if has_value(t._fake) and not (v := t._value).is_map]


@torch.no_grad()
def apply_effects(session: Session) -> None:
    """Apply the effects whose values are known."""
    waiting = []
    while session.effects:
        effect = session.effects.pop(0)
        if all(v in session.vectors for v in effect.values):
            tensors = [session.vectors[v] for v in effect.values]
            if effect.dormant:
                effect.dormant = False
                count_batch(effect.norm, 1)
            effect.run(effect.writes, tensors)
            if effect.block is not None:
                effect.results = [t.detach() for t in tensors]
                session.recomputed_effects.append(effect)
        else:
            waiting.append(effect)
    session.effects = waiting


def hook_recomputed_effects(session: Session, values: Sequence[Value]) -> None:
    """Register hooks that apply the effects of checkpointed blocks again in backward; see [Note: checkpoint]."""
    for v in values if session.recomputed_effects else ():
        if (result := session.vectors[v]).grad_fn is not None:
            behind = {made for node in ancestors([v]) for made in node.outputs}
            effects = [e for e in session.recomputed_effects if e.values[0] in behind]
            result.register_hook(partial(repeat_effects, effects, session.recomputed_blocks))


@torch.no_grad()
def repeat_effects(effects: Sequence[Effect], recomputed: Container[Hashable], gradient: Tensor) -> None:
    """Apply effects that a result depends on again, once in a backward pass."""
    now = current_pass()
    blocks = [list(group) for block, group in groupby(effects, lambda e: e.block) if block in recomputed]
    for effect in (e for block in reversed(blocks) for e in block if e.last_pass != now):
        effect.last_pass = now
        how: dict[str, float] = {}
        if (norm := effect.norm) is not None and norm.num_batches_tracked is not None:
            count = float(norm.num_batches_tracked.add_(1))
            how = {"momentum": 1 / count} if norm.momentum is None else {}
        effect.run(effect.writes, effect.results, **how)


def run_recording(recording: Recording, session: Session) -> None:
    """Choose a plan for a recording and run it."""
    check_versions(recording)
    engine = session.engine
    with profiler_range("plan"):
        plan = fixed_plan(recording.nodes, None) if engine is None else engine.choose(recording)
    step = Step() if engine is None else engine.begin_step(plan, recording)
    run_plan(plan, recording, Frame(recording.bindings, session.vectors, step))


def check_versions(recording: Recording) -> None:
    """Refuse a recording whose images or captured tensors were written to after an operator used them."""
    bindings = recording.bindings
    for v in recording.given:
        given = bindings.images.get(v) or bindings.captures.get(v)
        users = [n.label for n in recording.nodes if v in n.inputs] if given is not None and given.changed else []
        if users:
            what = "an image" if v in bindings.images else "a tensor"
            raise RecordingError(
                f"{what} of shape {v.shape} was changed in place after {users[0]} used it and before "
                "that operator ran. Change it earlier, use the out-of-place form, or take the value of what was "
                "recorded first (loss.item(), materialize(x))."
            )
