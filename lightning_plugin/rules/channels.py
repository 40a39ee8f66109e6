"""Operators that mix plain dimensions only, and so are local.

A dimension is plain if it has no axis: each tile has all of it. A softmax over channels mixes channels; a convolution
over windows of a patch mixes channels and the patch. If the dimensions that an operator mixes are plain, it computes a
tile as it computes the whole map, whatever axes the other dimensions have.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Dim, Layout
from lightning_plugin.private import operator_name, schema
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import API, ATEN, Recorder, Rule, either

aten = torch.ops.aten


def arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by name, in order, with defaults.

    The signature of a builtin function is the one that PyTorch lists for overrides.
    """
    if (operator := schema(func)) is not None:
        names = [a.name for a in operator.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        return {a.name: given.get(a.name, a.default_value) for a in operator.arguments}
    listed = func if inspect.isfunction(func) else torch.overrides.get_testing_overrides()[func]
    call = inspect.signature(listed).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


def is_plain(value: Value, dim: int) -> bool:
    """True if a dimension of a map has no axis, apart from axes of one position."""
    return not value.space.normalized.has_axis(dim % len(value.shape))


def resized(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return a layout with its plain dimensions set to the sizes of a result."""
    before, tidy = layout.shape, layout.normalized
    return Layout(
        tuple(
            dim if tidy.has_axis(d) or (layout.has_axis(d) and before[d] == shape[d]) else (shape[d],)
            for d, dim in enumerate(layout.dims)
        ),
        layout.extent,
    )


@dataclass(frozen=True)
class Result:
    """Function that computes one of several results of an operator.

    Attributes:
        func: The operator.
        place: Index of the result.
    """

    func: Any
    place: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.func(*args, **kwargs)[self.place]
        return found


def local_on_plain(
    rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], dims: Iterable[int]
) -> Any:
    """Record an operator that mixes the dimensions ``dims`` of its first argument as local; decline if one has an axis.

    Each result is a node of its own: a result that no operator reads costs nothing.
    """
    x, others = args[0], [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Value)]
    mixed = {d % len(x.shape) for d in dims}
    if not x.is_map or any(v.is_map for v in others) or not all(is_plain(x, d) for d in mixed):
        return NotImplemented
    carried: list[Dim] = [dim for d, dim in enumerate(x.space.dims) if d not in mixed]
    made = []
    for i, out in enumerate(outs):
        made_of = [*carried, *((size,) for size in out.shape[len(carried) :])]
        if len(out.shape) == len(x.shape):
            sizes = zip(x.space.dims, x.shape, out.shape, strict=True)
            made_of = [dim if size == new else (new,) for dim, size, new in sizes]
        layout = Layout(tuple(made_of), x.space.extent)
        one = func if len(outs) == 1 else Result(func, i)
        made.append(local(rec, one, args, kwargs, out, layout, name=operator_name(func)))
    return tuple(made)


def over_last_dims(*functions: Any, kind: str, **fields: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operators that mix the last dimensions: as many as the name says (``avg_pool2d``), else all
    but the first.

    If the rule declines and these dimensions are plain, the operator is local: its first dimensions (images of a batch,
    patches of an image, windows of attention) may have axes.
    """

    def add(rule: Rule) -> Rule:
        ATEN.rule(*functions, kind=kind, **fields)(either(rule, local_on_last_dims))
        return rule

    return add


def local_on_last_dims(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    if not x.is_map or all(size == 1 for size in x.space.extent):
        return NotImplemented
    count = re.search(r"(\d)d", operator_name(func))
    dims = range(1, len(x.shape)) if count is None else range(-int(count[1]), 0)
    return local_on_plain(rec, func, args, kwargs, outs, dims)


ATEN.rule(aten.col2im.default, kind="local where space is plain")(local_on_last_dims)


def reduced_dims(func: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], bool]:
    """Return the dimensions of a reduction, and True if it keeps them."""
    given = arguments(func, args, kwargs)
    rank = len(args[0].shape)
    dims = given.get("dim")
    if dims is None or dims == []:
        dims = range(rank)
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(d % rank for d in listed), bool(given.get("keepdim", False))


@API.rule(F.linear, kind="local")
def linear(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Local if the last dimension is plain; the operators that PyTorch runs for it would flatten axes."""
    x = args[0]
    if not x.is_map or not is_plain(x, -1):
        return NotImplemented
    layout = x.space.with_dim(len(x.shape) - 1, (outs[0].shape[-1],))
    return local(rec, func, args, kwargs, outs[0], layout, name="linear", autocast=rec.autocast)
