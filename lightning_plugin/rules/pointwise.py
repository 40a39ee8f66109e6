"""Local operators: an output position depends on the same position of the inputs only; channels may be mixed.

Operands are broadcast as in PyTorch. A vector with a size along an axis (a positional embedding, a mask) is spread: it
is used as a map, of which each tile takes its slice.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Dim, Layout, canonical
from lightning_plugin.ops import Call, Kernel, TileOp
from lightning_plugin.private import first_order, operator_name
from lightning_plugin.rules.table import API, ATEN, Recorder, decomposed

aten = torch.ops.aten

Custom = TypeVar("Custom", bound=torch.autograd.Function)


@dataclass(frozen=True)
class Local(TileOp):
    """Call that computes a box of the output from the same box of every map.

    Attributes:
        call: The call.
        extents: Extent of each map; along an axis of extent one it is broadcast.
    """

    kind: ClassVar[str] = "local"
    uniform: ClassVar[bool] = True
    call: Call
    extents: tuple[tuple[int, ...], ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        return tuple(box.broadcast(extent) for extent in self.extents)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return self.call([*tiles, *vectors])

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return None

    def kernel_for(self, box: Box) -> Kernel:
        return self.call.as_kernel

    def writing(self, func: Any) -> Kernel:
        """Return a kernel of the call's in-place form ``func``, which writes into its first map."""
        return replace(self.call, func=func).as_kernel

    def in_place(self, func: Any, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return self.writing(func)(tiles, vectors)


def local(rec: Recorder, func: Any, args: Any, kwargs: Any, out: Tensor, layout: Layout, **how: Any) -> Value:
    """Record a node that calls ``func`` on tiles as it would be called on whole maps."""
    values, new_args, new_kwargs = rec.template(args, kwargs)
    call = Call(func, new_args, new_kwargs, how.pop("autocast", None))
    extents = tuple(v.space.extent for v in values if v.is_map)
    return rec.emit(Local(call, extents), values, [out], layout, **how)[0]


def broadcast(rec: Recorder, operands: Sequence[Value], shape: Sequence[int]) -> tuple[list[Value], Layout] | None:
    """Return the operands, vectors spread if necessary, and the layout of the result; None if layouts conflict."""
    dims: list[Dim | None] = [None] * len(shape)
    maps = [v for v in operands if v.is_map]
    if len({len(m.space.extent) for m in maps}) != 1:
        return None
    extent = tuple(max(sizes) for sizes in zip(*(m.space.extent for m in maps), strict=True))
    for m in maps:
        if any(size not in (1, full) for size, full in zip(m.space.extent, extent, strict=True)):
            return None
        offset = len(shape) - len(m.shape)
        for d, dim in enumerate(m.space.dims):
            if m.space.normalized.has_axis(d):
                seen = dims[d + offset]
                if seen is not None and canonical(seen, extent) != canonical(dim, extent):
                    return None
                dims[d + offset] = dim if seen is None or len(dim) > len(seen) else seen
    for m in maps:  # axes of extent one keep their dimension if no other map has one there
        offset = len(shape) - len(m.shape)
        for d, dim in enumerate(m.space.dims):
            if m.space.has_axis(d) and dims[d + offset] is None and shape[d + offset] == 1:
                dims[d + offset] = dim
    space = {d for d, dim in enumerate(dims) if dim is not None}
    layout = Layout(tuple(dim if dim is not None else (shape[d],) for d, dim in enumerate(dims)), extent)
    axes = [f.index for dim in layout.dims for f in dim if isinstance(f, Axis) and extent[f.index] > 1]
    if layout.shape != tuple(shape) or len(set(axes)) < len(axes):  # an outer product has an axis twice
        return None
    for m in maps:  # a plain dimension of one map must not lie under a spatial one of another
        offset = len(shape) - len(m.shape)
        if any(d + offset in space and not m.space.has_axis(d) and size > 1 for d, size in enumerate(m.shape)):
            return None
    return [v if v.is_map else spread(rec, v, layout, space) for v in operands], layout


def spread(rec: Recorder, vector: Value, layout: Layout, space: set[int]) -> Value:
    """Return a vector operand as a map if it has more than one position in the dimensions ``space``, else unchanged."""
    offset = len(layout.dims) - len(vector.shape)
    mine = [d for d in range(len(vector.shape)) if d + offset in space]
    if all(vector.shape[d] == 1 for d in mine):
        return vector
    extent = [1] * len(layout.extent)
    dims: list[Dim] = []
    for d, size in enumerate(vector.shape):
        full = layout.dims[d + offset]
        if d in mine and size > 1:
            for f in full:
                if isinstance(f, Axis):
                    extent[f.index] = layout.extent[f.index]
            dims.append(full)
        else:
            dims.append((size,))
    missing = [a for a in range(len(extent)) if not any(Axis(a) in dim for dim in dims)]
    dims[0] = (*(Axis(a) for a in missing), *dims[0])
    return rec.spread(vector, Layout(tuple(dims), tuple(extent)))


def align(rec: Recorder, value: Value, layout: Layout) -> Value | None:
    """Return a value that broadcasts to a layout, vectors spread; None if it is a map of another layout."""
    space = set(layout.axis_dims)
    if not value.is_map:
        return spread(rec, value, layout, space)
    if len(value.space.extent) != len(layout.extent):
        return None
    offset = len(layout.dims) - len(value.shape)
    for d, dim in enumerate(value.space.dims):
        mine = canonical(dim, value.space.extent)
        if value.shape[d] > 1 and mine != canonical(layout.dims[d + offset], layout.extent):
            return None
    return value


def as_map(rec: Recorder, value: Value, layout: Layout) -> Value:
    """Return a value of a layout's shape as a map of this layout."""
    found = align(rec, value, layout) if value.is_map else None
    return rec.spread(rec.gather(value), layout) if found is None else found


def zeros(rec: Recorder, out: Tensor, name: str) -> Value:
    """Record a vector of zeros in place of a result that no operator reads; it has no gradient."""
    how = {"dtype": out.dtype, "device": out.device}
    return rec.vector(torch.zeros, [list(out.shape)], how, [out], name=name, grad=False)[0]


def pointwise(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], **how: Any) -> Any:
    """Record an operator that treats every position alike."""
    if len(outs) != 1:
        return NotImplemented
    operands = list(dict.fromkeys(a for a in [*args, *kwargs.values()] if isinstance(a, Value)))
    found = broadcast(rec, operands, outs[0].shape)
    if found is None:
        return NotImplemented
    replaced = dict(zip(operands, found[0], strict=True))
    swap = lambda a: replaced[a] if isinstance(a, Value) else a  # noqa: E731
    name = operator_name(func)
    grad = name not in NO_GRADIENT
    return local(
        rec,
        func,
        [swap(a) for a in args],
        {k: swap(v) for k, v in kwargs.items()},
        outs[0],
        found[1],
        name=name,
        grad=grad,
        **how,
    )


def elementwise(function: type[Custom]) -> type[Custom]:
    """Declare that a custom autograd function treats every position alike, in forward and backward: it is then tiled.

    Use it as a decorator of the class, or call it on the class::

        @elementwise
        class Round(torch.autograd.Function): ...
    """

    def rule(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
        return pointwise(rec, func, args, kwargs, outs, autocast=rec.autocast)

    API.rule(function.apply, kind="local")(rule)
    return function


class KeepGradient(torch.autograd.Function):
    """Take the values of ``new`` and the gradient of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, new: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return new.detach().to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, None


class ZeroGradient(torch.autograd.Function):
    """Take the values and the gradient of ``new``; the gradient of ``x`` is one of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, new: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, new.dtype
        ctx.set_materialize_grads(False)
        return new.detach().to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None
        return gradient.new_zeros(ctx.shape), gradient.to(ctx.dtype) if ctx.needs_input_grad[1] else None


def keep_gradient(rec: Recorder, x: Value, new: Value, out: Tensor) -> Value:
    """Record the new value of a tensor that autograd does not see written: ``x.data = new``, a write without grad.

    As in PyTorch, its derivative in ``x`` is one, whatever was written.
    """
    return written(rec, KeepGradient.apply, x, new, out)


def zero_gradient(rec: Recorder, x: Value, new: Value, out: Tensor) -> Value:
    """Record the new value of a tensor that was overwritten: the gradient of ``x`` is zero."""
    return written(rec, ZeroGradient.apply, x, new, out)


def written(rec: Recorder, func: Any, x: Value, new: Value, out: Tensor) -> Value:
    """Record ``func`` of the former and the new value of a tensor that was written to."""
    former, rec.grad = rec.grad, True
    try:
        if not x.is_map and not new.is_map:
            return rec.vector(func, (x, new), {}, [out], name="data")[0]
        found = pointwise(rec, func, (x, new), {}, [out])
        if found is not NotImplemented:
            return found  # type: ignore[no-any-return]
        return rec.barrier(func, (x, new), {}, [out], "the layouts of both maps differ", False)[0]
    finally:
        rec.grad = former


def without_gradient(rec: Recorder, value: Value) -> Value:
    """Record the value of a result that PyTorch does not differentiate."""
    if not value.is_map:
        return rec.vector(aten.detach.default, (value,), {}, [value.fake], name="detach")[0]
    return local(rec, aten.detach.default, [value], {}, value.fake, value.space, name="detach", grad=False)


@API.rule(KeepGradient.apply, kind="local")
def set_data(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """``x.data = new``."""
    rec.grad = True
    return pointwise(rec, func, args, kwargs, outs)


#: Operators that cut the gradient. That of ``sign`` or ``round`` is one of zeros, as in PyTorch.
NO_GRADIENT = {"detach", "zeros_like", "ones_like", "full_like"}

#: Pointwise operators that PyTorch does not tag as such.
UNTAGGED = (
    aten.absolute, aten.alias, aten.complex, aten.contiguous, aten.detach, aten.fill, aten.floor_divide, aten.full_like,
    aten.hardswish, aten.lift_fresh, aten.ones_like, aten.polar, aten.resolve_conj, aten.resolve_neg, aten.zeros_like,
    aten._conj, aten._neg_view, aten._prelu_kernel, aten._to_copy,
)  # fmt: skip

ATEN.rule(*UNTAGGED, torch.Tag.pointwise, kind="local")(pointwise)
ATEN.rule(aten.linalg_cross.default, aten.tril.default, aten.triu.default, kind="local")(decomposed)


@ATEN.rule(aten.log_sigmoid_forward, kind="local")
def log_sigmoid(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The second result is a buffer that only the CPU kernel's backward reads: it stays empty."""
    out = local(rec, torch.nn.functional.logsigmoid, args, {}, outs[0], args[0].space, name="log_sigmoid")
    return out, rec.vector(aten.empty.memory_format, ([0],), {}, [outs[1]])[0]


@ATEN.rule(aten.copy.default, kind="local")
def copy(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The result of ``target.copy_(source)`` is the source, perhaps a number, in the type of the target."""
    target, source = args[0], args[1]
    if not isinstance(source, Value):
        return pointwise(rec, aten.fill.Scalar, (target, source), {}, outs)
    if not source.is_map or source.shape != target.shape:
        return NotImplemented
    if target.is_map and target.space != source.space:
        return NotImplemented
    return local(rec, aten._to_copy.default, [source], {"dtype": target.dtype}, outs[0], source.space, name="copy")
