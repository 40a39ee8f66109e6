"""Vectors made as large as a map: a pooled vector that is interpolated, expanded or repeated back to the map's size.

The result belongs to the map it was made for. As a vector it would be held whole, and so would its gradient; as a map,
each tile makes its own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.rules.slices import Run, remap
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


def small_map(rec: Recorder, vector: Value) -> Value:
    """A vector ``(N, C, *space)`` as a map of that space."""
    found: Value = rec.spread(vector, Layout.channels_first(vector.shape))
    return found


@ATEN.enlarging(
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default, aten.upsample_linear1d.default, aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default, aten.upsample_bicubic2d.default, aten.repeat.default,
)  # fmt: skip
def as_on_maps(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Apply the operator's own rule to the vector as a map."""
    rule = ATEN.get(func)
    if rule is None or len(args[0].shape) != len(outs[0].shape):
        return NotImplemented
    return rule(rec, func, [small_map(rec, args[0]), *args[1:]], kwargs, outs)


@ATEN.enlarging(aten.expand.default)
def expand(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, shape = args[0], tuple(outs[0].shape)
    if len(x.shape) != len(shape):
        return NotImplemented
    maps = {d: (Run(0, shape[d], 0, 0),) for d in range(2, len(shape)) if shape[d] != x.shape[d]}
    found = remap(rec, small_map(rec, x), maps, "expand")
    rule = ATEN.get(func)
    if found is None or rule is None:
        return NotImplemented
    return found if found.shape == shape else rule(rec, func, [found, shape], {}, outs)
