"""Looking up along channels: one-hot codes, embeddings, class weights, gather and scatter where the index is
a map.

They are local: what is looked up for a position depends on that position's index alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.rules.channels import name_of, plain, resized
from lightning_plugin.rules.norm import arguments
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import API, ATEN, Recorder

aten = torch.ops.aten


def lined_up(rec: Recorder, operands: Sequence[Value], dim: int) -> list[Value] | None:
    """Operands of one rank as maps that lie alike but for ``dim``; None where they do not."""
    first = next(v for v in operands if v.is_map)
    space = first.space.space
    if dim in space:
        return None
    maps = []
    for v in operands:
        if len(v.shape) != len(first.shape) or any(v.shape[d] != first.shape[d] for d in space):
            return None
        layout = resized(first.space, v.shape)
        if not v.is_map:
            v = rec.spread(v, layout)
        if v.space.extent != layout.extent or any(
            v.space.tidy.dims[d] != layout.tidy.dims[d] for d in {*space, *v.space.space}
        ):
            return None
        maps.append(v)
    return maps


@API.rule(F.one_hot, kind="local")
def one_hot(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    names = ("tensor", "num_classes")
    a = {"num_classes": -1} | dict(zip(names, args, strict=False)) | kwargs
    x = a.get("tensor", a.get("input", a.get("self")))
    if a["num_classes"] < 0 or not x.is_map:
        return NotImplemented
    layout = Layout((*x.space.dims, (outs[0].shape[-1],)), x.space.extent)
    return local(rec, F.one_hot, [x, a["num_classes"]], {}, outs[0], layout, name="one_hot", grad=False)


@ATEN.rule(aten.gather.default)
def gather(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, index = args[:3]
    dim %= max(1, len(x.shape))
    maps = lined_up(rec, [x, index], dim)
    if maps is None:
        return NotImplemented
    return local(rec, func, [maps[0], dim, maps[1]], {}, outs[0], maps[1].space, name="gather")


@ATEN.rule(
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    kind="local",
)
def scatter(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, index, source, *rest = args
    dim %= max(1, len(x.shape))
    maps = lined_up(rec, [x, index, *([source] if isinstance(source, Value) else [])], dim)
    if maps is None:
        return NotImplemented
    what = maps[2] if isinstance(source, Value) else source
    return local(
        rec,
        func,
        [maps[0], dim, maps[1], what, *rest],
        kwargs,
        outs[0],
        resized(maps[0].space, outs[0].shape),
        name=name_of(func),
    )


@ATEN.rule(aten.index.Tensor)
def index(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """``weight[classes]`` with a map of classes, and ``x[:, order]`` with an order of channels."""
    x, indices = args
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    dims = [d for d, _ in given]
    if dims != list(range(dims[0], dims[0] + len(dims))) or any(i.dtype == torch.bool for _, i in given):
        return NotImplemented
    before, after = x.shape[: dims[0]], x.shape[dims[-1] + 1 :]
    if not x.is_map:
        spaces = {i.space if i.is_map else None for _, i in given}
        if len(spaces) != 1 or None in spaces:
            return NotImplemented
        (space,) = spaces
        assert space is not None
        layout = Layout((*((n,) for n in before), *space.dims, *((n,) for n in after)), space.extent)
        return local(rec, func, [x, list(indices)], {}, outs[0], layout, name="index")
    if len(given) != 1 or given[0][1].is_map or not plain(x, dims[0]):
        return NotImplemented
    middle = tuple((n,) for n in given[0][1].shape)
    layout = Layout((*x.space.dims[: dims[0]], *middle, *x.space.dims[dims[0] + 1 :]), x.space.extent)
    return local(rec, func, [x, list(indices)], {}, outs[0], layout, name="index")


@API.rule(F.embedding, kind="local")
def embedding(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    x = a["input"]
    if not x.is_map or a["weight"].is_map or a["max_norm"] is not None or a["sparse"] or a["scale_grad_by_freq"]:
        return NotImplemented
    layout = Layout((*x.space.dims, (outs[0].shape[-1],)), x.space.extent)
    padding = {"padding_idx": a["padding_idx"]}
    return local(rec, F.embedding, [x, a["weight"]], padding, outs[0], layout, name="embedding", autocast=rec.autocast)


@ATEN.rule(aten.bucketize.Tensor, kind="local")
def bucketize(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, bounds = args
    if not x.is_map or bounds.is_map:
        return NotImplemented
    return local(rec, func, [x, bounds], kwargs, outs[0], x.space, name="bucketize", grad=False)
