"""Operators that a call runs on fake tensors, one level below autograd; what they write, and what a write means for
tensors that share memory.

[Note: views] A recorded tensor is a view of another where an operator of `VIEWS` made it from that one. The user may
write to either. No map has memory that two tensors could share, so a write is made good in values: the tensor that was
written to gets the new value, each tensor that it is a view of gets the value with the new part put in, up to the one
that is nobody's view, and all others that share the memory are *stale*: when one of them is used, its view is taken
anew. What is written to a detached tensor changes the values of the other and not its gradient. Where an operator of
unknown kind lies between, a stale tensor cannot be made good, and its use is an error.

PyTorch's functionalisation (functional wrappers around the fakes, watched beneath) was tried in place of this. It
turns the 24 programs of the tests into 188 operators where this makes 176, none of them in place, and would remove
about 115 lines here and in `record`. Three programs then have wrong gradients, because it works below autograd and
knows neither ``detach`` nor ``no_grad``; a call that is recorded whole (a barrier, a rule of `API`) has to be put into
its wrappers by hand; writes into an image of the user's need the views as they are kept here; in-place kernels are
gone. Each call takes 22 µs longer to record, of 190, and five private functions of PyTorch are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.session import Session, Stale, bind, bound
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.private import TorchDispatchMode, operator_name, schema, storage_key, tree_leaves
from lightning_plugin.rules.replaced import hidden
from lightning_plugin.rules.table import Recorder

aten = torch.ops.aten


# Operators


def copied(x: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """Result of ``x.copy_(new)``."""
    return new.to(x.device, x.dtype).expand_as(x).clone()


#: Operators to be run on vectors in place of others: real vectors need not have the strides of their fakes, and a view
#: is particular about strides; the out-of-place copy has no derivative.
ON_VECTORS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.copy.default: copied,
}

#: In-place operators that overwrite a map with something of the same shape and type, whose backward needs the result
#: or nothing. They save memory where the user's code uses them, so they are run as the user wrote them.
IN_PLACE = {
    getattr(aten, name).default
    for name in (
        "relu_ leaky_relu_ elu_ celu_ hardtanh_ hardswish_ hardsigmoid_ silu_ mish_ sigmoid_ tanh_ threshold_ relu6_"
    ).split()
    if hasattr(getattr(aten, name, None), "default")
} | {aten.add_.Tensor, aten.mul_.Tensor, aten.sub_.Tensor, aten.div_.Tensor}


def functional(func: Any) -> Any:
    """The operator that computes what an in-place operator writes."""
    packet = getattr(aten, operator_name(func).removesuffix("_"), None)
    if schema(func).name == "aten::copy_":
        return aten.copy.default
    overload = schema(func).overload_name or "default"
    return getattr(packet, overload, None) if packet is not None else None


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """One operator that ran on fake tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def outs(self) -> list[Tensor]:
        return [o for o in tree_leaves(self.out) if isinstance(o, Tensor)]


class OperatorLog(TorchDispatchMode):
    """Mode that lists the operators which a function runs on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append(OperatorCall(func, args, kwargs, out))
        return out


def watch(session: Session, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, OperatorLog]:
    """The result of a call, and what it ran."""
    with session.faking(), torch.no_grad(), OperatorLog() as seen:
        out = func(*args, **kwargs)
    return out, seen


def mutated(seen: OperatorLog, fakes: Sequence[Tensor]) -> list[Tensor]:
    """The argument tensors that the call wrote to, itself or through views."""
    wrote = [t for c in seen.calls for t in written_by(c.func, c.args, c.kwargs)]
    return list({id(f): f for f in fakes if any(same_memory(f, t) for t in wrote)}.values())


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
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
    """Place of a tensor in its ``parent``: the operator, and its arguments after the parent."""

    parent: Tensor
    func: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def take(self, parent: Tensor) -> Tensor:
        """The view of a parent."""
        return self.func(parent, *self.args, **self.kwargs)  # type: ignore[no-any-return]

    def put(self, parent: Tensor, part: Tensor) -> Tensor:
        """The parent with a new part in the view's place."""
        return VIEWS[self.func](parent, part, *self.args, **self.kwargs)  # type: ignore[no-any-return]


def _reshaped(parent: Tensor, part: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return part.reshape(parent.shape)


def _permuted(parent: Tensor, part: Tensor, dims: Sequence[int]) -> Tensor:
    order = [d % parent.dim() for d in dims]
    return part.permute([order.index(d) for d in range(len(order))])


#: For each operator that makes views, how a new part is put into the parent.
VIEWS: dict[Any, Callable[..., Tensor]] = {
    aten.slice.Tensor: torch.slice_scatter,
    aten.select.int: torch.select_scatter,
    aten.diagonal.default: torch.diagonal_scatter,
    aten.permute.default: _permuted,
    aten.transpose.int: lambda parent, part, a, b: part.transpose(a, b),
    aten.t.default: lambda parent, part: part.t(),
    aten.alias.default: lambda parent, part: part,
    **dict.fromkeys(
        (
            aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
            aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        ),
        _reshaped,
    ),
}  # fmt: skip


def note_views(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor]) -> None:
    """Remember how results lie in the first argument, if they share its memory."""
    if not outs or not args or not isinstance(args[0], Tensor) or not same_memory(outs[0], args[0]):
        return
    for out, view in zip(outs, views_of(func, args, kwargs, outs), strict=False):
        if out is not args[0]:
            out.sft_view = view  # type: ignore[attr-defined]


def views_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor]) -> Iterator[View]:
    parent, *rest = args
    if func in VIEWS or func is aten.detach.default:
        yield View(parent, func, tuple(rest), kwargs)
    elif func in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0)
        start = 0
        for out in outs:
            yield View(parent, aten.slice.Tensor, (dim, start, start + out.shape[dim]))
            start += out.shape[dim]
    elif func is aten.unbind.int:
        dim = kwargs.get("dim", rest[0] if rest else 0)
        for i in range(len(outs)):
            yield View(parent, aten.select.int, (dim, i))


def view_of(fake: Tensor) -> View | None:
    return getattr(fake, "sft_view", None)


def same_memory(a: Tensor, b: Tensor) -> bool:
    return storage_key(a) == storage_key(b)


def remember_storage(session: Session, fake: Tensor) -> None:
    known = session.storages.setdefault(storage_key(fake), [])
    if not any(f is fake for f in known):
        known.append(fake)


def rebind(session: Session, fake: Tensor, value: Value, writer: str, recorder: Recorder) -> None:
    """Bind a tensor that was written to to its new value, as [Note: views] says."""
    for other in session.storages.get(storage_key(fake), ()):
        if other is not fake and not is_above(other, fake):
            bind(other, Stale(writer))
    bind(fake, value)
    part = fake
    while (view := view_of(part)) is not None:
        former, new = bound(view.parent), bound(part)
        if not isinstance(former, Value) or not isinstance(new, Value):
            break
        if view.func is not aten.detach.default:
            if view.func not in VIEWS:
                break
            new = bound(recorder.apply(view.put, view.parent, part))
            assert isinstance(new, Value)
        if former.requires_grad and (not recorder.grad or view.func is aten.detach.default):
            new = hidden(recorder, former, new, view.parent)
        bind(view.parent, new)
        part = view.parent
    while (view := view_of(part)) is not None:  # beyond what could be followed
        part = view.parent
        bind(part, Stale(writer))


def is_above(other: Tensor, fake: Tensor) -> bool:
    """True of a view of another tensor, or of a view of it."""
    view = view_of(fake)
    while view is not None:
        if view.parent is other:
            return True
        view = view_of(view.parent)
    return False


def current(fake: Tensor, recorder: Recorder) -> Value:
    """The value of a tensor as it is after all writes."""
    state = bound(fake)
    if isinstance(state, Value):
        return state
    view = view_of(fake)
    if state is None or view is None:
        raise unknown() if state is None else stale(state, recorder.label)
    current(view.parent, recorder)
    value = bound(recorder.apply(view.take, view.parent))
    assert isinstance(value, Value)
    bind(fake, value)
    return value


def unknown() -> RecordingError:
    return RecordingError("a lazy tensor that belongs to no recording was used; make it with LazyImage(source)")


def stale(state: Stale, user: str) -> RecordingError:
    return RecordingError(
        f"{user} uses a tensor that shares memory with one that {state.writer} has written to in place, in a way that "
        "cannot be followed. Tiles are computed apart from each other, so such a write is not seen through another "
        f"tensor. Use the out-of-place form of {state.writer}, or clone() the tensor before it."
    )
