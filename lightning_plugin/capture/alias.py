"""Log of the operators that a call runs on fake tensors, one level below autograd; views, and writes to shared memory.

[Note: views] A recorded tensor is a view of its *parent* if an operator of `VIEW_UPDATES` made it. The user may write
to either. Recorded maps have no memory to share, so a write makes new values: the written tensor is bound to its new
value, and each parent, up to the base, to its own value with the new part put in. All other tensors that share the
memory become *stale*: the next use of one takes its view again. A write to a detached tensor changes the values of the
base and not its gradient. If an operator outside of `VIEW_UPDATES` lies between, a stale tensor cannot be computed, and
its use is an error.

PyTorch's functionalisation (functional wrappers around the fakes) was tried instead. It turns the 24 programs of the
tests into 188 operators, compared to 176 here, none of them in place, and would remove about 115 lines here and in
`record`. Three programs then have wrong gradients, because it works below autograd and knows neither ``detach`` nor
``no_grad``. A call that is recorded whole (a barrier, a rule of `API`) has to be put into its wrappers by hand. Writes
into an image of the user's need the views that are kept here. In-place kernels are lost. Each call takes 22 µs longer
to record, of 190, and five private functions of PyTorch are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.session import Session, Stale, bind, binding_of, logs
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.ops import has_gradients
from lightning_plugin.private import (
    TorchDispatchMode,
    UnsupportedOperatorException,
    operator_name,
    schema,
    storage_key,
    tree_leaves,
    tree_map,
)
from lightning_plugin.rules.pointwise import keep_gradient, zero_gradient
from lightning_plugin.rules.table import Recorder

aten = torch.ops.aten


# Operators


def copy_out_of_place(x: Tensor, new: Tensor | complex, non_blocking: bool = False) -> Tensor:
    """Return the result of ``x.copy_(new)``; the gradient of ``x`` is one of zeros."""
    found = torch.as_tensor(new).to(x.device, x.dtype).expand_as(x)
    return (
        torch.where(torch.ones((), dtype=torch.bool, device=x.device), found, x) if x.requires_grad else found.clone()
    )


#: Replacements of operators on vectors: a view depends on strides, which a vector's fake need not share, and the
#: out-of-place copy has no derivative.
VECTOR_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.copy.default: copy_out_of_place,
}

#: Functions whose results have no gradient.
WITHOUT_GRADIENT = {
    aten.detach.default, torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like,
    torch.randn_like,
}  # fmt: skip

#: In-place operators that run in place on tiles too, to save memory: the result has the shape and type of the input,
#: and backward needs the result or nothing.
REPLAYED_IN_PLACE = {
    getattr(aten, name).default
    for name in (
        "relu_ leaky_relu_ elu_ celu_ hardtanh_ hardswish_ hardsigmoid_ silu_ mish_ sigmoid_ tanh_ threshold_ relu6_"
    ).split()
    if hasattr(getattr(aten, name, None), "default")
} | {aten.add_.Tensor, aten.mul_.Tensor, aten.sub_.Tensor, aten.div_.Tensor}


#: In-place operators that autograd does not see: what is written has the derivative of what was there.
UNSEEN_IN_PLACE = {
    aten.logical_and_.default, aten.logical_or_.default, aten.logical_xor_.default, aten.logical_not_.default,
}  # fmt: skip


@cache
def out_of_place(func: Any) -> Any:
    """Return the out-of-place form of an in-place operator; None if there is none.

    It is the overload that takes the same types: ``pow_.Scalar`` has a tensor as its base, ``pow.Scalar`` a number.
    """
    if schema(func).name == "aten::copy_":
        return aten.copy.default
    packet = getattr(aten, operator_name(func).removesuffix("_"), None)
    types = [str(a.type) for a in schema(func).arguments]
    named = schema(func).overload_name or "default"
    overloads = [] if packet is None else sorted(packet.overloads(), key=lambda name: name != named)
    found = (getattr(packet, name) for name in overloads)
    return next((f for f in found if [str(a.type) for a in schema(f).arguments] == types), None)


def left_out(func: Any, form: Any, given: int) -> list[Any]:
    """Return the arguments after the first ``given`` ones that PyTorch has left out of the call of an in-place
    operator, as they are its defaults, and that its out-of-place form has no defaults for: ``bernoulli_``'s 0.5."""
    pairs = zip(schema(func).arguments[given:], schema(form).arguments[given:], strict=False)
    return [a.default_value for a, b in pairs if a.has_default_value() and not b.has_default_value()]


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """Operator that ran on fake tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def outs(self) -> list[Tensor]:
        return [o for o in tree_leaves(self.out) if isinstance(o, Tensor)]

    def replace(self, tensor: Tensor, other: Tensor) -> OperatorCall:
        """Return the call with another tensor in the place of one."""
        args, kwargs, out = tree_map(lambda a: other if a is tensor else a, (self.args, self.kwargs, self.out))
        return OperatorCall(self.func, args, kwargs, out)


class OperatorLog(TorchDispatchMode):
    """Dispatch mode that lists the operators that a function runs on fake tensors.

    An operator that changes the shape of a tensor in place (``squeeze_``) is listed as one that makes a view: the
    operators before it have another tensor, of the former shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags and (view := out_of_place(func)) is not None:
            former = aten.alias.default(args[0])
            out = func(*args, **kwargs)
            self.calls = [call.replace(out, former) for call in self.calls]
            func, args = view, (former, *args[1:])
        else:
            out = func(*args, **kwargs)
        self.calls.append(OperatorCall(func, args, kwargs, out))
        return out


def log_operators(session: Session, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, OperatorLog]:
    """Run a function on fake tensors; return its result and the log of its operators."""
    with session.fake_tensors(), torch.no_grad(), OperatorLog() as log:
        out = func(*args, **kwargs)
    if any(isinstance(o, Tensor) and o.layout is not torch.strided for o in tree_leaves(out)):
        raise UnsupportedOperatorException(func)  # type: ignore[arg-type]  # no memory that others could share
    return out, log


#: Calls of operators that are remembered: lists of tensors may be of any length.
MAX_KNOWN_CALLS = 4096
#: For operators, the arguments that require grad and the number of results, whether each result does.
_differentiates: dict[tuple[Any, tuple[bool, ...], int], tuple[bool, ...]] = {}


def differentiates(session: Session, call: OperatorCall, needs: Callable[[Tensor], bool]) -> tuple[bool, ...]:
    """Return for each result of an operator whether it requires grad in PyTorch.

    The operator runs once with autograd on fake tensors: no list says which results have no derivative.

    Args:
        session: The session, for its fake tensors.
        call: The call. What is written in place requires grad if what was there did.
        needs: Whether an argument requires grad.
    """
    tensors = [a for a in tree_leaves((call.args, call.kwargs)) if isinstance(a, Tensor)]
    key = call.func, tuple(has_gradients(t.dtype) and needs(t) for t in tensors), len(call.outs)
    if not any(key[1]) or call.func is aten.copy.default or schema(call.func).is_mutable:
        return (any(key[1]),) * len(call.outs)
    if key not in _differentiates:
        required = {id(t) for t, need in zip(tensors, key[1], strict=True) if need}

        def twin(a: Any) -> Any:
            return a.detach().requires_grad_(id(a) in required) if isinstance(a, Tensor) else a

        try:
            with session.fake_tensors(), torch.enable_grad():
                out = call.func(*tree_map(twin, call.args), **tree_map(twin, call.kwargs))
            found = tuple(o.requires_grad for o in tree_leaves(out) if isinstance(o, Tensor))
        except RuntimeError:  # a kernel that PyTorch does not choose where this argument requires grad: flash attention
            found = (True,) * len(call.outs)
        if len(_differentiates) >= MAX_KNOWN_CALLS:
            _differentiates.clear()
        _differentiates[key] = found
    return _differentiates[key]


def written_tensors(log: OperatorLog, fakes: Sequence[Tensor]) -> list[Tensor]:
    """Return those of some tensors that a call wrote to, also through views."""
    wrote = [t for c in log.calls for t in written_arguments(c.func, c.args, c.kwargs)]
    return list({id(f): f for f in fakes if any(shares_storage(f, t) for t in wrote)}.values())


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an operator writes to, by its schema."""
    found = schema(func)
    if found is None or not found.is_mutable:
        return
    for i, a in enumerate(found.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            t = args[i] if i < len(args) else kwargs.get(a.name)
            if isinstance(t, Tensor):
                yield t


# Views


@dataclass(frozen=True, eq=False)
class View:
    """View of a ``parent``, by an operator with its arguments after the parent; ``grad``: gradients were enabled."""

    parent: Tensor
    func: Any
    grad: bool
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def take(self, parent: Tensor) -> Tensor:
        """Return the view of a parent."""
        return self.func(parent, *self.args, **self.kwargs)  # type: ignore[no-any-return]

    def put(self, parent: Tensor, part: Tensor) -> Tensor:
        """Return the parent with a new part in the view's place."""
        return VIEW_UPDATES[self.func](parent, part, *self.args, **self.kwargs)  # type: ignore[no-any-return]


def _reshape_like(parent: Tensor, part: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return part.reshape(parent.shape)


def _permute_back(parent: Tensor, part: Tensor, dims: Sequence[int]) -> Tensor:
    order = [d % parent.dim() for d in dims]
    return part.permute([order.index(d) for d in range(len(order))])


def _scatter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that puts a slice into its parent; for complex tensors, PyTorch's has no derivative."""

    def put(parent: Tensor, part: Tensor, dim: int = 0, *args: Any) -> Tensor:
        if not parent.is_complex():
            return function(parent, part, dim, *args)
        real, part = (torch.view_as_real(t.resolve_conj()) for t in (parent, part))
        return torch.view_as_complex(function(real, part, dim % parent.dim(), *args))

    return put


#: For each operator that makes views, the function that puts a new part into the parent.
VIEW_UPDATES: dict[Any, Callable[..., Tensor]] = {
    aten.slice.Tensor: _scatter(torch.slice_scatter),
    aten.select.int: _scatter(torch.select_scatter),
    aten.diagonal.default: torch.diagonal_scatter,
    aten.permute.default: _permute_back,
    aten.transpose.int: lambda parent, part, a, b: part.transpose(a, b),
    aten.t.default: lambda parent, part: part.t(),
    aten.alias.default: lambda parent, part: part,
    aten.view_as_real.default: lambda parent, part: torch.view_as_complex(part),
    aten.view_as_complex.default: lambda parent, part: torch.view_as_real(part),
    aten._conj.default: lambda parent, part: part.conj(),
    aten._neg_view.default: lambda parent, part: part.neg(),
    **dict.fromkeys(
        (
            aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
            aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        ),
        _reshape_like,
    ),
}  # fmt: skip


def register_views(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor], grad: bool) -> None:
    """Attach a `View` to each result that shares the memory of the first argument."""
    if not outs or not args or not isinstance(args[0], Tensor) or not shares_storage(outs[0], args[0]):
        return
    for out, view in zip(outs, views_of(func, args, kwargs, outs, grad), strict=False):
        if out is not args[0]:
            out.sft_view = view  # type: ignore[attr-defined]


def views_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor], grad: bool
) -> Iterator[View]:
    """Yield the view of each result; a split is as many slices, an unbind as many selections."""
    parent, *rest = args
    if func in VIEW_UPDATES or func is aten.detach.default:
        yield View(parent, func, grad, tuple(rest), kwargs)
    elif func in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0)
        start = 0
        for out in outs:
            yield View(parent, aten.slice.Tensor, grad, (dim, start, start + out.shape[dim]))
            start += out.shape[dim]
    elif func is aten.unbind.int:
        dim = kwargs.get("dim", rest[0] if rest else 0)
        for i in range(len(outs)):
            yield View(parent, aten.select.int, grad, (dim, i))


def view_of(fake: Tensor) -> View | None:
    return getattr(fake, "sft_view", None)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return storage_key(a) == storage_key(b)


def register_storage(session: Session, fake: Tensor) -> None:
    """Add a fake tensor to those of its storage."""
    key = storage_key(fake)
    if session.add_stored(key, fake) and logs.now is not None:
        logs.now.stored.append((key, fake))


def bind_written(session: Session, fake: Tensor, value: Value, writer: str, recorder: Recorder) -> None:
    """Bind a written tensor and its parents to their new values; see [Note: views].

    What was overwritten has a gradient of zeros, as in PyTorch.
    """
    former = binding_of(fake)
    if recorder.grad and isinstance(former, Value) and former.requires_grad and not is_made_of(value, former, recorder):
        value = zero_gradient(recorder, former, value, fake)
    for other in session.fakes_by_storage.get(storage_key(fake), ()):
        if other is not fake and not is_viewed_by(other, fake):
            bind(other, Stale(writer))
    bind(fake, value)
    part = fake
    while (view := view_of(part)) is not None:
        former, new = binding_of(view.parent), binding_of(part)
        if not isinstance(former, Value) or not isinstance(new, Value):
            break
        if view.func is not aten.detach.default:
            if view.func not in VIEW_UPDATES:
                break
            new = binding_of(recorder.apply(view.put, view.parent, part))
            assert isinstance(new, Value)
        if former.requires_grad and (not recorder.grad or view.func is aten.detach.default):
            new = keep_gradient(recorder, former, new, view.parent)
        elif former.requires_grad and not new.requires_grad:
            new = zero_gradient(recorder, former, new, view.parent)
        bind(view.parent, new)
        part = view.parent
    while (view := view_of(part)) is not None:  # parents whose new values are unknown
        part = view.parent
        bind(part, Stale(writer))


def is_made_of(value: Value, former: Value, recorder: Recorder) -> bool:
    """True if a value has a gradient, and depends on a former one through nodes of the recorder's call."""
    seen, stack = set[Value](), [value] if value.requires_grad else []
    while stack:
        v = stack.pop()
        if v is former:
            return True
        if v not in seen and v.node is not None and v.node.serial > recorder.begin:
            stack += v.node.inputs
        seen.add(v)
    return False


def is_viewed_by(other: Tensor, fake: Tensor) -> bool:
    """True if ``fake`` is a view of ``other``, also through further views."""
    view = view_of(fake)
    while view is not None:
        if view.parent is other:
            return True
        view = view_of(view.parent)
    return False


def has_value(fake: Tensor) -> bool:
    """True if the value of a tensor is known, or that of a parent, of which its view can be taken again."""
    while not isinstance(binding_of(fake), Value):
        view = view_of(fake)
        if view is None:
            return False
        fake = view.parent
    return True


def current_value(fake: Tensor, recorder: Recorder) -> Value:
    """Return the value of a tensor after all writes; the view of a stale tensor is taken again."""
    state = binding_of(fake)
    if isinstance(state, Value):
        return state
    view = view_of(fake)
    if state is None or view is None:
        raise unrecorded_error() if state is None else stale_error(state, recorder.label)
    current_value(view.parent, recorder)
    recorder.grad, grad = view.grad, recorder.grad
    value = binding_of(recorder.apply(view.take, view.parent))
    recorder.grad = grad
    assert isinstance(value, Value)
    bind(fake, value)
    return value


def unrecorded_error() -> RecordingError:
    return RecordingError("a lazy tensor that belongs to no recording was used; make it with LazyImage(source)")


def stale_error(state: Stale, user: str) -> RecordingError:
    return RecordingError(
        f"{user} uses a tensor that shares memory with one that {state.writer} has written to in place, through a view "
        "of unknown kind. Tiles are computed one by one, so such a write does not reach the other tensor. Use the "
        f"out-of-place form of {state.writer}, or clone() the tensor before it."
    )
