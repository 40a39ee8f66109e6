"""Recording: what happens when the user's code calls an operator on a lazy tensor.

The call runs once on fake tensors, which know shapes, dtypes, devices and autocast and hold no data. That run is
watched one level below autograd, where the many spellings of an operator (``x + y``, ``torch.add``, ``x.add_``) have
become one. Then

1. a rule for the function itself (`api`) gets the call, where the function is worth more whole than in pieces: a
   normalisation, a dropout, a padding;
2. else every operator that was seen gets its rule, which turns it into a node;
3. else, if one has no rule, the function as the user called it becomes a barrier. So does a custom autograd function,
   whose derivative is not that of its operators.

A call on vectors alone needs no rule. An in-place operator makes a new value and binds the tensor it wrote to to that
value; what that means for tensors that share its memory is said in [Note: views] in `alias`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.alias import (
    IN_PLACE,
    ON_VECTORS,
    OperatorCall,
    OperatorLog,
    current,
    functional,
    mutated,
    note_views,
    rebind,
    remember_storage,
    same_memory,
    view_of,
    watch,
    written_by,
)
from lightning_plugin.capture.run import await_update, run
from lightning_plugin.capture.session import Session, bind, bound, calling, name_of_call
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Effect, Node, Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Autocast, Barrier, Call, Gather, Op, Slot, Source, Spread, VectorOp
from lightning_plugin.private import (
    BatchNormBase,
    FakeTensor,
    checkpointed,
    custom_function,
    operator_name,
    recomputing,
    storage_key,
    tree_leaves,
    tree_map,
)
from lightning_plugin.rules.pointwise import zeros
from lightning_plugin.rules.replaced import hidden
from lightning_plugin.rules.table import API, ATEN
from lightning_plugin.rules.uncut import alternatives

#: Why a custom autograd function is run whole.
UNDECLARED = (
    "a custom autograd function has no tiling rule; one that treats every position alike is tiled if it is declared: "
    "lightning_plugin.elementwise(function)"
)


class Unsettled(Exception):
    """A rule has to know tensors that the recording is still to write."""


class WritesImage(Exception):
    """A call writes into an image that lies in a tensor of the user's."""


class Recorder:
    """One call being recorded: what its rules use to make values and nodes.

    A rule changes nothing but this: what the call does besides returning results (``effects``) takes hold when the call
    is recorded, and not where the rule declines after all.
    """

    def __init__(self, session: Session, func: Callable[..., Any] | None, autocast: Autocast):
        self.session = session
        self.name = "this call" if func is None else name_of_call(func)
        self.autocast = autocast
        self.grad = torch.is_grad_enabled()
        self.module, self.path = calling()
        #: The block of `torch.utils.checkpoint` in which the call is made.
        self.block = checkpointed() if self.grad else None
        self.effects: list[tuple[Effect, Sequence[Value]]] = []

    @property
    def label(self) -> str:
        """The call as messages name it."""
        return f"{self.name} in '{self.path}'" if self.path else self.name

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without data, for the result of a node."""
        with self.session.faking():
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def update(
        self, buffers: Sequence[Value], values: Sequence[Value], run: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """Have a module's buffers written, once, when the values are known; see [Note: buffers] in `run`."""
        norm = self.module if isinstance(self.module, BatchNormBase) else None
        if recomputing():  # the backward pass does it, and counts; see [Note: checkpoint] in `run`
            if norm is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.sub_(1)
            return
        writes = tuple(map(self.session.tensor, buffers))
        self.effects.append((Effect(tuple(values), run, writes, block=self.block, norm=norm), buffers))

    def then(self, values: Sequence[Value], run: Callable[[Sequence[Tensor]], None]) -> None:
        """Have something happen, once, when the values are known."""
        self.effects.append((Effect(tuple(values), run), ()))

    def settled(self, values: Iterable[Value]) -> None:
        """Go on only if the recording has written these captured tensors: it is run otherwise, and the rule asked
        again."""
        if self.session.unsettled(values):
            raise Unsettled

    def commit(self) -> None:
        """The call is recorded: what it does besides takes hold."""
        for effect, buffers in self.effects:
            for v in buffers:
                await_update(self.session.written(v), self.session)
            self.session.effects.append(effect)

    def emit(
        self,
        op: Op,
        inputs: Sequence[Value],
        fakes: Sequence[Tensor],
        layouts: Sequence[Layout | None] | Layout | None,
        name: str = "",
        grad: bool = True,
    ) -> tuple[Value, ...]:
        """Add a node; an output requires grad as PyTorch's would. A map without positions is a vector."""
        if layouts is not None and not any(f.numel() for f in fakes):
            return tuple(zeros(self, f, "nothing") for f in fakes)
        if layouts is None or isinstance(layouts, Layout):
            layouts = [layouts] * len(fakes)
        needs = grad and self.grad and any(v.requires_grad for v in inputs)
        if needs and self.block is not None:
            self.session.recomputed.add(self.block)
        outputs = tuple(
            Value(f, layout, needs and (f.is_floating_point() or f.is_complex()))
            for f, layout in zip(fakes, layouts, strict=True)
        )
        for v in outputs:
            if v.layout is not None and v.layout.shape != v.shape:
                raise AssertionError(f"rule for {name or self.name}: layout says {v.layout.shape}, tensor is {v.shape}")
        node = Node(op, tuple(inputs), outputs, name or self.name, self.path)
        if op.kind == "window" and self.module is not None and self.module.training:
            self.session.trained.add(node.serial)
        last = min(self.session.instances, default=None)
        self.session.extents.update(v.layout.extent[:last] for v in outputs if v.layout is not None)
        return outputs

    def decompose(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record what a function, whose operators have rules of their own, runs on values: its results, or
        `NotImplemented` where a step has no rule."""

        def fake(a: Any) -> Any:
            if not isinstance(a, Value):
                return a
            if bound(a.fake) is not a:
                fresh = self.fake(a.shape, a.dtype, a.device)
                bind(fresh, a)
                return fresh
            return a.fake

        fakes, named = tree_map(fake, (args, kwargs))
        out, seen = watch(self.session, function, fakes, named)
        if lower(self, seen) is not None:
            return NotImplemented
        return tuple(bound(o) for o in tree_leaves(out) if isinstance(o, Tensor))

    def template(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Value, ...], tuple[Any, ...], tuple]:
        """The values in a call's arguments (maps first) and the arguments with slots in their place."""
        flat = tree_leaves((args, kwargs))
        values = list(dict.fromkeys(a for a in flat if isinstance(a, Value)))
        values.sort(key=lambda v: not v.is_map)
        place = {v: Slot(i) for i, v in enumerate(values)}

        def slot(a: Any) -> Any:
            return place[a] if isinstance(a, Value) else a

        new_args = tree_map(slot, tuple(args))
        new_kwargs = tuple((k, tree_map(slot, v)) for k, v in kwargs.items())
        return tuple(values), new_args, new_kwargs

    def vector(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], fakes: Sequence[Tensor], **how: Any
    ) -> tuple[Value, ...]:
        """A node that runs a function on vectors with ordinary autograd."""
        values, new_args, new_kwargs = self.template(args, kwargs)
        call = Call(func, new_args, new_kwargs, how.pop("autocast", None))
        return self.emit(VectorOp(call, how.pop("rebind", False)), values, fakes, None, **how)

    def apply(self, func: Callable[..., Tensor], *fakes: Tensor) -> Tensor:
        """Record a function of tensors that are bound to values; the fake of its result, bound to its value."""
        out, seen = watch(self.session, func, fakes, {})
        reason = lower(self, seen)
        if reason is not None:
            values = [bound(f) for f in fakes]
            bind(out, self.barrier(func, values, {}, [out], reason, False)[0])
        return out  # type: ignore[no-any-return]

    def value(self, tensor: Tensor) -> Value | None:
        """The value of a tensor in a call that was watched; numbers that the call itself has made are captured."""
        if not isinstance(tensor, FakeTensor):
            return self.session.capture(tensor)
        return None if bound(tensor) is None else current(tensor, self)

    def spread(self, vector: Value, layout: Layout) -> Value:
        """A vector with spatial dimensions as a map."""
        return self.emit(Spread(layout), [vector], [vector.fake], layout, "slice")[0]

    def gather(self, value: Value) -> Value:
        """A map as one tensor."""
        return self.emit(Gather(), [value], [value.fake], None, "gather")[0] if value.is_map else value

    def barrier(
        self, func: Callable[..., Any], args: Any, kwargs: Any, fakes: Sequence[Tensor], reason: str, rebind: bool
    ) -> tuple[Value, ...]:
        """Run the function whole; outputs shaped like one of its maps are maps again."""
        flat = tree_leaves((args, kwargs))
        layouts = [v.space for v in flat if isinstance(v, Value) and v.is_map]
        args, kwargs = tree_map(lambda a: self.gather(a) if isinstance(a, Value) else a, (args, kwargs))
        values, new_args, new_kwargs = self.template(args, kwargs)
        call = Call(func, new_args, new_kwargs, self.autocast)
        outputs = self.emit(Barrier(call, reason, rebind), values, fakes, None)
        return tuple(self.restore(v, layouts) for v in outputs)

    def restore(self, value: Value, layouts: Sequence[Layout]) -> Value:
        for layout in layouts:
            dims = layout.dims
            if len(dims) == len(value.shape) and all(value.shape[d] == layout.shape[d] > 1 for d in layout.space):
                new = Layout(
                    tuple(dim if layout.is_space(d) else (value.shape[d],) for d, dim in enumerate(dims)), layout.extent
                )
                return self.spread(value, new)
        return value


def record(session: Session, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call whose tensors are fakes bound to values; returns its result with fakes bound to values."""
    try:
        return attempt(session, func, args, kwargs)
    except Unsettled:
        run(session)  # and forget nothing: a call is being recorded
        return attempt(session, func, args, kwargs)


def attempt(session: Session, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """`record`, unless a rule finds something unsettled."""
    flat = tree_leaves((args, kwargs))
    fakes = [a for a in flat if isinstance(a, Tensor)]
    recorder = Recorder(session, func, Autocast.now(fakes[0].device))
    before = {id(f): current(f, recorder) for f in fakes}
    for f in fakes:
        remember_storage(session, f)
    out, seen = watch(session, API.stand_ins.get(func, func), args, kwargs)
    results = [o for o in tree_leaves(out) if isinstance(o, Tensor)]
    to_value = lambda a: before.get(id(a), a) if isinstance(a, Tensor) else a  # noqa: E731
    vargs, vkwargs = tree_map(to_value, (args, kwargs))

    targets = mutated(seen, fakes)
    if recorder.grad and any(before[id(f)].requires_grad and is_image(before[id(f)]) for f in targets):
        raise RecordingError(f"{recorder.name} writes in place into an image that requires grad; clone() it first")
    if any(lies_in(session, f) is not None for f in targets):
        raise WritesImage
    spatial = any(v.is_map for v in before.values())
    values = None
    custom = custom_function(func) is not None
    if not spatial and not targets and (custom or not (makes_views(results, fakes) or enlarges(session, seen))):
        if rule := API.of_vectors.get(func):
            values = answer(rule(recorder, func, vargs, vkwargs, results))
        if values is None:
            values = recorder.vector(func, vargs, vkwargs, results, autocast=recorder.autocast)
    elif spatial and (rule := API.get(func)):
        values = ask(rule, recorder, func, vargs, vkwargs, results)
    if values is None:
        memory = {id(f): (f, bound(f)) for t in targets for f in session.storages[storage_key(t)]}
        reason = UNDECLARED if custom else lower(recorder, seen)
        if reason is None:
            write_back(recorder, targets, before)
            hide_writes(recorder, targets, before)
            recorder.commit()
            return out
        recorder.effects.clear()
        for f, state in memory.values():
            bind(f, state)  # type: ignore[arg-type]
        if len(targets) > 1 or (targets and targets[0] is not fakes[0]):
            raise RecordingError(
                f"{recorder.name} writes into several tensors, one of them lazy: it cannot be recorded"
            )
        results = targets or results
        values = recorder.barrier(func, vargs, vkwargs, results, reason, bool(targets))
    for call in seen.calls:
        note_views(call.func, call.args, call.kwargs, call.outs)
    for fake, value in zip(results, values, strict=True):
        if id(fake) in before:
            rebind(session, fake, value, recorder.name, recorder)
        else:
            bind(fake, value)
            remember_storage(session, fake)
    hide_writes(recorder, targets, before)
    recorder.commit()
    return out


def write_back(recorder: Recorder, targets: Sequence[Tensor], before: Mapping[int, Value]) -> None:
    """Tensors of the user's own that a call writes besides what it returns, as an InstanceNorm does its running
    statistics, are written when what they become is known."""
    for f in targets:
        own = before[id(f)]
        if own in recorder.session.bindings.captures:
            new = recorder.gather(current(f, recorder))
            tensor = recorder.session.tensor(own)
            recorder.effects.append((Effect((new,), partial(overwrite, tensor), (tensor,)), [own]))


def overwrite(tensor: Tensor, new: Sequence[Tensor]) -> None:
    with torch.no_grad():
        tensor.copy_(new[0])


def hide_writes(recorder: Recorder, targets: Sequence[Tensor], before: Mapping[int, Value]) -> None:
    """Give tensors that were written without grad their new values and their old gradient, as PyTorch does."""
    for f in targets:
        value = bound(f)
        if before[id(f)].requires_grad and not recorder.grad and isinstance(value, Value):
            bind(f, hidden(recorder, before[id(f)], value, f))


def lies_in(session: Session, fake: Tensor) -> Tensor | None:
    """The tensor of the user's, or the view of it, that an image, or a view of one, lies in."""
    state, view = bound(fake), view_of(fake)
    if isinstance(state, Value) and state in session.bindings.images:
        return session.bindings.images[state].here
    parent = None if view is None else lies_in(session, view.parent)
    return None if view is None or parent is None else view.take(parent)


def is_image(value: Value) -> bool:
    return value.node is not None and isinstance(value.node.op, Source)


def makes_views(results: Sequence[Tensor], fakes: Sequence[Tensor]) -> bool:
    """True if a result shares memory with an argument."""
    return any(same_memory(r, f) for r in results for f in fakes)


def enlarges(session: Session, seen: OperatorLog) -> bool:
    return any(enlarger(session, c.func, c.args, c.out) for c in seen.calls)


def enlarger(session: Session, func: Any, args: Any, out: Any) -> Callable[..., Any] | None:
    """The rule for an operator on a vector whose result is as large as a map that was recorded: it is a map too."""
    rule = ATEN.enlargers.get(func)
    if rule is None or not isinstance(out, Tensor) or out.dim() < 3:
        return None
    size = tuple(out.shape[2:])
    return rule if size in session.extents and size != tuple(args[0].shape[2:]) else None


def ask(
    rule: Callable[..., Any], recorder: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]
) -> tuple[Value, ...] | None:
    """A rule's answer: to the call as it is or, if it declines that, on maps that are cut along fewer axes."""
    found = answer(rule(recorder, func, args, kwargs, outs))
    if found is not None:
        return found
    values = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Value)]
    for instead in alternatives(recorder, values, rule is API.get(func)):
        swapped, named = tree_map(
            lambda a: instead.get(a, a) if isinstance(a, Value) else a,  # noqa: B023
            (args, kwargs),
        )
        found = answer(rule(recorder, func, swapped, named, outs))
        if found is not None:
            return found
    return None


def answer(result: Any) -> tuple[Value, ...] | None:
    """A rule's answer as a tuple, or None where it declined."""
    if result is NotImplemented:
        return None
    return (result,) if isinstance(result, Value) else tuple(result)


def lower(recorder: Recorder, seen: OperatorLog) -> str | None:
    """Turn every operator that was seen into nodes; returns the reason where that is not possible."""
    for call in seen.calls:
        failed = lower_one(recorder, call) if call.outs else None
        if failed:
            return failed
    return None


def lower_one(recorder: Recorder, seen: OperatorCall) -> str | None:
    func, args, kwargs, outs = seen.func, seen.args, seen.kwargs, seen.outs
    written = list(written_by(func, args, kwargs))
    if len(written) > 1 or (written and "out" in kwargs):
        return f"{func} writes into more than its first argument"
    call = functional(func) if written else func
    if call is None:
        return f"{func} has no form that does not write in place"
    flat = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    values_of = {id(f): value for f in flat if (value := recorder.value(f)) is not None}
    vargs, vkwargs = tree_map(lambda a: values_of.get(id(a)) if isinstance(a, Tensor) else a, (args, kwargs))
    name = operator_name(call)
    values = None
    if any(v.is_map for v in values_of.values()):
        rule = ATEN.get(call)
        values = ask(rule, recorder, call, vargs, vkwargs, outs) if rule else None
        if values is None:
            return f"{name} has no tiling rule for these arguments" if rule else f"{name} has no tiling rule"
    elif grow := enlarger(recorder.session, call, args, outs[0]):
        values = answer(grow(recorder, call, vargs, vkwargs, outs))
    if values is None:
        values = recorder.vector(ON_VECTORS.get(call, call), vargs, vkwargs, outs, name=name)
    # Through a view, in place would write into what others may read.
    made = values[0].node
    if written and made is not None and func in IN_PLACE and view_of(written[0]) is None:
        Node(made.op, made.inputs, made.outputs, made.name, made.path, func, made.serial)
    note_views(func, args, kwargs, outs)
    for fake, value in zip(outs, values, strict=True):
        remember_storage(recorder.session, fake)
        if written and fake is written[0]:
            rebind(recorder.session, fake, value, name, recorder)
        else:
            bind(fake, value)
    return None
