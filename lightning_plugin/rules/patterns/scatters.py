"""Putting a part into a map: what a write through a view comes to (see [Note: views] in `capture.alias`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


@ATEN.rule(aten.slice_scatter.default, kind="local or layout")
def slice_scatter(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Put the part before the slice, the new part and the part after it side by side."""
    given = dict(zip(("x", "part", "dim", "start", "end", "step"), args, strict=False)) | kwargs
    x, part, dim = args[0], args[1], given.get("dim", 0) % len(outs[0].shape)
    start, stop, step = slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(x.shape[dim])
    if step != 1:
        return NotImplemented
    return rec.decompose(lambda x, part: joined(x, part, dim, start, max(start, stop)), x, part)


@ATEN.rule(aten.select_scatter.default, kind="local or layout")
def select_scatter(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The same of one position."""
    x, part, dim, index = args
    dim %= len(outs[0].shape)
    index %= x.shape[dim]
    return rec.decompose(lambda x, part: joined(x, part.unsqueeze(dim), dim, index, index + 1), x, part)


def joined(x: Tensor, part: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """``x`` with a new part from ``start`` to ``stop``."""
    after = x.shape[dim] - stop
    pieces = [x.narrow(dim, 0, start)] if start else []
    pieces.append(part)
    if after:
        pieces.append(x.narrow(dim, stop, after))
    return torch.cat(pieces, dim) if len(pieces) > 1 else part.clone()
