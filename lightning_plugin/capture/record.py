"""Recording of a call on lazy tensors: nodes by rules, or a barrier.

The call runs once on fake tensors, which have shapes, dtypes, devices and autocast, and no data. Its operators are
logged one level below autograd, where the spellings of an operator (``x + y``, ``torch.add``, ``x.add_``) are one. Then

1. a rule for the function itself (`API`) gets the call, if there is one: for functions that are simpler to tile than
   their operators, such as a normalisation, a dropout, a padding;
2. else each operator in the log is recorded as a node by its rule (`ATEN`);
3. else, if one has no rule, the function that the user called becomes a barrier. So does a custom autograd function,
   whose derivative is not that of its operators.

A call on vectors alone needs no rule. An in-place operator makes a new value, to which the written tensor is bound; for
tensors that share its memory see [Note: views] in `alias`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.alias import (
    REPLAYED_IN_PLACE,
    UNSEEN_IN_PLACE,
    VECTOR_OPERATORS,
    WITHOUT_GRADIENT,
    OperatorCall,
    OperatorLog,
    bind_written,
    current_value,
    differentiates,
    left_out,
    log_operators,
    out_of_place,
    register_storage,
    register_views,
    shares_storage,
    view_of,
    written_arguments,
    written_tensors,
)
from lightning_plugin.capture.run import add_effect, count_batch, run
from lightning_plugin.capture.session import Session, bind, binding_of, current_module, function_name, logs
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Effect, Node, Value, next_serial
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Autocast, Barrier, Call, Gather, Op, Slot, Source, Spread, VectorOp, has_gradients
from lightning_plugin.private import (
    BatchNormBase,
    FakeTensor,
    checkpoint_block,
    custom_function,
    is_recomputing,
    operator_name,
    schema,
    storage_key,
    tree_leaves,
    tree_map,
)
from lightning_plugin.rules.pointwise import keep_gradient, without_gradient
from lightning_plugin.rules.reductions import nothing
from lightning_plugin.rules.table import API, ATEN
from lightning_plugin.rules.uncut import alternatives

#: The reason for running a custom autograd function whole.
UNDECLARED_FUNCTION = (
    "a custom autograd function has no tiling rule; one that treats every position alike is tiled if it is declared: "
    "lightning_plugin.elementwise(function)"
)


class PendingWrites(Exception):
    """A rule needs the data of tensors that the recording has still to write."""


class WritesImage(Exception):
    """A call writes into an image, and so into a tensor of the user's."""


class Recorder:
    """Recorder of one call, with which rules make values and nodes.

    Rules change no other state. Their effects (writes of buffers) are registered when the call is recorded, so that a
    rule may still decline.

    Attributes:
        session: The session that gets the nodes.
        name: Name of the function.
        autocast: The autocast state of the call.
        grad: Whether gradients are enabled.
        module: The innermost module that is being called, and its ``path``.
        block: The block of `torch.utils.checkpoint` in which the call is made.
        effects: Effects so far, each with the captured tensors that it writes.
        begin: Serial number before those of the call's nodes.
    """

    def __init__(self, session: Session, func: Callable[..., Any] | None, autocast: Autocast):
        self.session = session
        self.name = "this call" if func is None else function_name(func)
        self.autocast = autocast
        self.grad = torch.is_grad_enabled()
        self.module, self.path = current_module()
        self.block = checkpoint_block() if self.grad else None
        self.effects: list[tuple[Effect, Sequence[Value]]] = []
        self.begin = next_serial()

    @property
    def label(self) -> str:
        """Name of the call in messages."""
        return f"{self.name} in '{self.path}'" if self.path else self.name

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a tensor without data, for the result of a node."""
        with self.session.fake_tensors():
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def update(self, buffers: Sequence[Value], values: Sequence[Value], run: Callable[..., None]) -> None:
        """Write a module's buffers once the values are known; see [Note: buffers] in `run`.

        Args:
            buffers: The buffers.
            values: The values.
            run: Function of the buffers and of the values' results. It holds no tensors.
        """
        norm = self.module if isinstance(self.module, BatchNormBase) else None
        if is_recomputing():  # the backward pass updates and counts; see [Note: checkpoint] in `run`
            count_batch(norm, -1)
            return
        writes = tuple(map(self.session.captured_tensor, buffers))
        self.effects.append((Effect(tuple(values), run, writes, block=self.block, norm=norm), buffers))

    def then(self, values: Sequence[Value], run: Callable[[Sequence[Tensor], Sequence[Tensor]], None]) -> None:
        """Call a function, of no tensors and of the values' results, once they are known."""
        self.effects.append((Effect(tuple(values), run), ()))

    def settled(self, values: Iterable[Value]) -> None:
        """Require the data of captured tensors. If the recording has still to write one, it runs, and then the rule is
        applied again."""
        values = list(values)
        if self.session.has_pending_writes(values):
            raise PendingWrites
        if logs.now is not None:
            logs.now.settled += values

    def read(self, value: Value) -> Tensor:
        """Return a captured tensor whose data decides what is recorded."""
        self.settled([value])
        if logs.now is not None:
            logs.now.is_repeatable = False
        return self.session.captured_tensor(value)

    def commit(self) -> None:
        """Register the effects of the recorded call."""
        for effect, buffers in self.effects:
            add_effect(self.session, effect, buffers)
            if logs.now is not None:
                logs.now.effects.append((replace(effect, writes=()), buffers))

    def emit(
        self,
        op: Op,
        inputs: Sequence[Value],
        fakes: Sequence[Tensor],
        layouts: Sequence[Layout | None] | Layout | None,
        name: str = "",
        grad: bool = True,
    ) -> tuple[Value, ...]:
        """Add a node; an output requires grad as PyTorch's would. An empty map is a vector."""
        needs = grad and self.grad and any(v.requires_grad for v in inputs)
        if layouts is not None and not any(f.numel() for f in fakes):
            return tuple(nothing(self, inputs if grad else (), f) for f in fakes)
        if layouts is None or isinstance(layouts, Layout):
            layouts = [layouts] * len(fakes)
        if needs and self.block is not None:
            self.session.recomputed_blocks.add(self.block)
        outputs = tuple(
            Value(f, layout, needs and has_gradients(f.dtype)) for f, layout in zip(fakes, layouts, strict=True)
        )
        for v in outputs:
            if v.layout is not None and v.layout.shape != v.shape:
                raise AssertionError(f"rule for {name or self.name}: layout says {v.layout.shape}, tensor is {v.shape}")
        node = Node(op, tuple(inputs), outputs, name or self.name, self.path)
        if op.kind == "window" and self.module is not None and self.module.training:
            self.session.windows_in_training.add(node.serial)
        last = min(self.session.instance_axes, default=None)
        extents = {v.layout.extent[:last] for v in outputs if v.layout is not None}
        self.session.extents |= extents
        self.session.add_nodes([node.serial])
        if logs.now is not None:
            logs.now.serials.append(node.serial)
            logs.now.extents |= extents
        return outputs

    def decompose(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the operators that a function runs on values; return its results, or `NotImplemented` if an operator
        has no rule."""

        def fake(a: Any) -> Any:
            if not isinstance(a, Value):
                return a
            if binding_of(a.fake) is not a:
                fresh = self.fake(a.shape, a.dtype, a.device)
                bind(fresh, a)
                return fresh
            return a.fake

        fakes, named = tree_map(fake, (args, kwargs))
        out, log = log_operators(self.session, function, fakes, named)
        if record_operators(self, log) is not None:
            return NotImplemented
        return tuple(binding_of(o) for o in tree_leaves(out) if isinstance(o, Tensor))

    def template(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Value, ...], tuple[Any, ...], tuple]:
        """Return the values in a call's arguments (maps first), and the arguments with slots in their place."""
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
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        fakes: Sequence[Tensor],
        name: str = "",
        grad: bool = True,
        autocast: Autocast | None = None,
    ) -> tuple[Value, ...]:
        """Add a node that runs a function on vectors with ordinary autograd."""
        values, new_args, new_kwargs = self.template(args, kwargs)
        grad = grad and func not in WITHOUT_GRADIENT
        return self.emit(VectorOp(Call(func, new_args, new_kwargs, autocast)), values, fakes, None, name, grad)

    def apply(self, func: Callable[..., Tensor], *fakes: Tensor) -> Tensor:
        """Record a function of bound tensors; return the fake of its result, bound to its value."""
        out, log = log_operators(self.session, func, fakes, {})
        reason = record_operators(self, log)
        if reason is not None:
            values = [binding_of(f) for f in fakes]
            bind(out, self.barrier(func, values, {}, [out], reason, False)[0])
        return out  # type: ignore[no-any-return]

    def value(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor in a logged operator; a tensor with data, which the call has made, is
        captured."""
        if not isinstance(tensor, FakeTensor):
            return self.session.capture(tensor)
        return None if binding_of(tensor) is None else current_value(tensor, self)

    def spread(self, vector: Value, layout: Layout) -> Value:
        """Make a map of a vector with spatial dimensions."""
        return self.emit(Spread(layout), [vector], [vector.fake], layout, "slice")[0]

    def gather(self, value: Value) -> Value:
        """Make one tensor of a map."""
        return self.emit(Gather(), [value], [value.fake], None, "gather")[0] if value.is_map else value

    def barrier(
        self, func: Callable[..., Any], args: Any, kwargs: Any, fakes: Sequence[Tensor], reason: str, writes_input: bool
    ) -> tuple[Value, ...]:
        """Add a node that runs a function whole; outputs shaped like one of its maps are maps again."""
        flat = tree_leaves((args, kwargs))
        layouts = [v.space for v in flat if isinstance(v, Value) and v.is_map]
        args, kwargs = tree_map(lambda a: self.gather(a) if isinstance(a, Value) else a, (args, kwargs))
        values, new_args, new_kwargs = self.template(args, kwargs)
        call = Call(func, new_args, new_kwargs, self.autocast)
        outputs = self.emit(Barrier(call, reason, writes_input), values, fakes, None)
        return tuple(self.restore(v, layouts) for v in outputs)

    def restore(self, value: Value, layouts: Sequence[Layout]) -> Value:
        """Make a map of a barrier's result that has the spatial dimensions of one of its inputs' layouts."""
        for layout in layouts:
            dims = layout.dims
            if len(dims) == len(value.shape) and all(value.shape[d] == layout.shape[d] > 1 for d in layout.axis_dims):
                new = Layout(
                    tuple(dim if layout.has_axis(d) else (value.shape[d],) for d, dim in enumerate(dims)), layout.extent
                )
                return self.spread(value, new)
        return value


def record(session: Session, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call on fake tensors that are bound to values; return its result, of bound fakes."""
    try:
        return try_record(session, func, args, kwargs)
    except PendingWrites:
        if logs.now is not None:
            logs.now.is_repeatable = False
        run(session)  # nothing is dropped: a call is being recorded
        return try_record(session, func, args, kwargs)


def try_record(session: Session, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call.

    Raises:
        PendingWrites: A rule needs the data of a tensor that the recording has still to write.
        WritesImage: The call writes into an image.
    """
    flat = tree_leaves((args, kwargs))
    fakes = [a for a in flat if isinstance(a, Tensor)]
    recorder = Recorder(session, func, Autocast.current(fakes[0].device))
    before = {id(f): current_value(f, recorder) for f in fakes}
    for f in fakes:
        register_storage(session, f)
    entry = API.entry(func)
    out, log = log_operators(session, (entry and entry.stand_in) or func, args, kwargs)
    results = [o for o in tree_leaves(out) if isinstance(o, Tensor)]
    to_value = lambda a: before.get(id(a), a) if isinstance(a, Tensor) else a  # noqa: E731
    vargs, vkwargs = tree_map(to_value, (args, kwargs))

    targets = written_tensors(log, fakes)
    if recorder.grad and any(before[id(f)].requires_grad and is_image(before[id(f)]) for f in targets):
        raise RecordingError(f"{recorder.name} writes in place into an image that requires grad; clone() it first")
    if any(tensor_of_image(session, f) is not None for f in targets):
        raise WritesImage
    has_maps = any(v.is_map for v in before.values())
    values = None
    custom = custom_function(func) is not None
    if not has_maps and not targets and (custom or not (returns_views(results, fakes) or enlarges(session, log))):
        if entry is not None and entry.on_vectors is not None:
            values = as_values(entry.on_vectors(recorder, func, vargs, vkwargs, results))
        if values is None:
            values = recorder.vector(func, vargs, vkwargs, results, autocast=recorder.autocast)
    elif has_maps and (rule := API.get(func)):
        values = apply_rule(rule, recorder, func, vargs, vkwargs, results)
    if values is None:
        former = {id(f): (f, binding_of(f)) for t in targets for f in session.fakes_by_storage[storage_key(t)]}
        reason = UNDECLARED_FUNCTION if custom else record_operators(recorder, log)
        if reason is None:
            update_captured(recorder, targets, before)
            restore_gradients(recorder, targets, before)
            recorder.commit()
            return out
        recorder.effects.clear()
        for f, state in former.values():
            bind(f, state)  # type: ignore[arg-type]
        if len(targets) > 1 or (targets and targets[0] is not fakes[0]):
            raise RecordingError(
                f"{recorder.name} writes into several tensors, one of them lazy: it cannot be recorded"
            )
        results = targets or results
        values = recorder.barrier(func, vargs, vkwargs, results, reason, bool(targets))
    replaced = entry is not None and entry.stand_in is not None  # the log is of the stand-in
    found = values if custom or replaced else differentiated(recorder, log, before, results, values)
    for call in log.calls:
        register_views(call.func, call.args, call.kwargs, call.outs, recorder.grad)
    for fake, value in zip(results, found, strict=True):
        if id(fake) in before:
            bind_written(session, fake, value, recorder.name, recorder)
        else:
            bind(fake, value)
            register_storage(session, fake)
    restore_gradients(recorder, targets, before)
    recorder.commit()
    return out


def differentiated(
    recorder: Recorder,
    log: OperatorLog,
    before: Mapping[int, Value],
    results: Sequence[Tensor],
    values: Sequence[Value],
) -> Sequence[Value]:
    """Return the values of a call that is one node, without gradient where PyTorch has no derivative (``histc``)."""
    if not any(v.requires_grad for v in values) or any(schema(call.func).is_mutable for call in log.calls):
        return list(values)
    needs = {key: value.requires_grad for key, value in before.items()}
    for call in log.calls:
        found = differentiates(recorder.session, call, lambda t: needs.get(id(t), False))
        needs.update(zip(map(id, call.outs), found, strict=True))
    return [
        v if needs.get(id(f), True) or not v.requires_grad else without_gradient(recorder, v)
        for f, v in zip(results, values, strict=True)
    ]


def update_captured(recorder: Recorder, targets: Sequence[Tensor], before: Mapping[int, Value]) -> None:
    """Register effects that write captured tensors (an InstanceNorm's running statistics) once their new values are
    known."""
    for f in targets:
        own = before[id(f)]
        if own in recorder.session.bindings.captures:
            new = recorder.gather(current_value(f, recorder))
            tensor = recorder.session.captured_tensor(own)
            recorder.effects.append((Effect((new,), overwrite, (tensor,)), [own]))


def overwrite(tensors: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    with torch.no_grad():
        tensors[0].copy_(new[0])


def restore_gradients(recorder: Recorder, targets: Sequence[Tensor], before: Mapping[int, Value]) -> None:
    """Keep the old gradient of tensors that were written without grad, as PyTorch does."""
    for f in targets if not recorder.grad else ():
        value, former = binding_of(f), before[id(f)]
        if former.requires_grad and isinstance(value, Value):
            bind(f, keep_gradient(recorder, former, value, f))


def tensor_of_image(session: Session, fake: Tensor) -> Tensor | None:
    """Return the user's tensor behind an image, or the same view of it; None for other tensors."""
    state, view = binding_of(fake), view_of(fake)
    if isinstance(state, Value) and state in session.bindings.images:
        return session.bindings.images[state].on_device
    parent = None if view is None else tensor_of_image(session, view.parent)
    return None if view is None or parent is None else view.take(parent)


def is_image(value: Value) -> bool:
    return value.node is not None and isinstance(value.node.op, Source)


def returns_views(results: Sequence[Tensor], fakes: Sequence[Tensor]) -> bool:
    """True if a result shares memory with an argument."""
    return any(shares_storage(r, f) for r in results for f in fakes)


def enlarges(session: Session, log: OperatorLog) -> bool:
    return any(enlarges_vector(session, c.func, c.args, c.out) for c in log.calls)


def enlarges_vector(session: Session, func: Any, args: Any, out: Any) -> bool:
    """True if an operator makes a vector as large as a recorded map."""
    entry = ATEN.entry(func)
    if entry is None or not entry.enlarges or not isinstance(out, Tensor) or not 3 <= out.dim() == args[0].dim():
        return False
    size = tuple(out.shape[2:])
    return size in session.extents and size != tuple(args[0].shape[2:])


def apply_rule(
    rule: Callable[..., Any], recorder: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]
) -> tuple[Value, ...] | None:
    """Apply a rule to a call or, if it declines, to the call on maps that are cut along fewer axes; None if it declines
    all. Empty results need no rule."""
    values = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Value)]
    if outs and not any(o.numel() for o in outs):
        return tuple(nothing(recorder, values, o) for o in outs)
    found = as_values(rule(recorder, func, args, kwargs, outs))
    if found is not None:
        return found
    for replacements in alternatives(recorder, values, rule is API.get(func)):
        new_args, new_kwargs = tree_map(
            lambda a: replacements.get(a, a) if isinstance(a, Value) else a,  # noqa: B023
            (args, kwargs),
        )
        found = as_values(rule(recorder, func, new_args, new_kwargs, outs))
        if found is not None:
            return found
    return None


def as_values(result: Any) -> tuple[Value, ...] | None:
    """Convert a rule's result to a tuple of values; None if the rule declined."""
    if result is NotImplemented:
        return None
    return (result,) if isinstance(result, Value) else tuple(result)


def record_operators(recorder: Recorder, log: OperatorLog) -> str | None:
    """Record every operator of a log; return the reason if one has no rule."""
    for call in log.calls:
        failed = record_operator(recorder, call) if call.outs else None
        if failed:
            return failed
    return None


def record_operator(recorder: Recorder, logged: OperatorCall) -> str | None:
    """Record an operator of a log; return the reason if that is not possible."""
    func, args, kwargs, outs = logged.func, logged.args, logged.kwargs, logged.outs
    written = list(written_arguments(func, args, kwargs))
    if len(written) > 1 or (written and "out" in kwargs):
        return f"{func} writes into more than its first argument"
    call = out_of_place(func) if written else func
    if call is None:
        return f"{func} has no form that does not write in place"
    if written:
        args = (*args, *left_out(func, call, len(args)))
    flat = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    values_of = {id(f): value for f in flat if (value := recorder.value(f)) is not None}
    vargs, vkwargs = tree_map(lambda a: values_of.get(id(a)) if isinstance(a, Tensor) else a, (args, kwargs))
    name = operator_name(call)
    values = None
    if any(v.is_map for v in values_of.values()):
        rule = ATEN.get(call)
        values = apply_rule(rule, recorder, call, vargs, vkwargs, outs) if rule else None
        if values is None:
            return f"{name} has no tiling rule for these arguments" if rule else f"{name} has no tiling rule"
    elif enlarges_vector(recorder.session, call, args, outs[0]):
        small = recorder.spread(vargs[0], Layout.channels_first(vargs[0].shape))
        rule = ATEN.get(call)
        values = as_values(rule(recorder, call, [small, *vargs[1:]], vkwargs, outs)) if rule else None
    if values is None:
        values = recorder.vector(VECTOR_OPERATORS.get(call, call), vargs, vkwargs, outs, name=name)
    # Through a view, an in-place kernel would write into memory that other operators may read.
    made = values[0].node
    if written and made is not None and func in REPLAYED_IN_PLACE and view_of(written[0]) is None:
        Node(made.op, made.inputs, made.outputs, made.name, made.path, func, made.serial)
    register_views(func, args, kwargs, outs, recorder.grad)
    if any(v.requires_grad for v in values):
        need = differentiates(
            recorder.session, OperatorCall(call, args, kwargs, logged.out), lambda t: values_of[id(t)].requires_grad
        )
        values = tuple(
            v if n or not v.requires_grad else without_gradient(recorder, v) for v, n in zip(values, need, strict=True)
        )
    for fake, value in zip(outs, values, strict=True):
        register_storage(recorder.session, fake)
        if func in UNSEEN_IN_PLACE and recorder.grad and values_of[id(fake)].requires_grad:
            value = keep_gradient(recorder, values_of[id(fake)], value, fake)
        if written and fake is written[0]:
            bind_written(recorder.session, fake, value, name, recorder)
        else:
            bind(fake, value)
    return None
