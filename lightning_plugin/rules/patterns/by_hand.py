"""Attention that is written by hand: a product of queries and keys, a softmax, and a product with values.

    softmax(q @ kᵀ · scale + mask) @ v

Where positions look at positions it is recorded as the attention that it is, so that keys and values are stored once,
and read piece by piece where they do not fit. Whoever else reads scores or weights has them as they were written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.ops import Gather, Slot, Spread
from lightning_plugin.rules.attention import Asked, attended
from lightning_plugin.rules.pointwise import Local
from lightning_plugin.rules.table import Recorder
from lightning_plugin.rules.uncut import Uncut, axes_under
from lightning_plugin.rules.views import Expand, Reshape

aten = torch.ops.aten

#: Functions that multiply all scores by a number, each with the number that this makes of it.
SCALES = {
    aten.mul.Tensor: lambda number: number,
    aten.mul.Scalar: lambda number: number,
    aten.div.Tensor: lambda number: 1 / number,
    aten.div.Scalar: lambda number: 1 / number,
}


def attention_by_hand(rec: Recorder, weights: Value, value: Value, out: Tensor) -> Any:
    """The attention that a product of weights ``(B, t, T)`` and values ``(B, T, d)`` ends, if it does."""
    if not weights.is_map or not value.is_map or len(weights.shape) != 3 or not axes_under(value, [1]):
        return NotImplemented
    softmax = seen(weights)
    if called(softmax) is not aten._softmax.default or not over_last(softmax):
        return NotImplemented
    scores, scale, mask = softmax.node.inputs[0], 1.0, None  # type: ignore[union-attr]
    while (func := called(scores := seen(scores))) not in (aten.bmm.default, aten.mm.default):
        node = scores.node
        if node is None or not isinstance(node.op, Local):
            return NotImplemented
        if func in SCALES and len(node.inputs) == 1 and isinstance(number := node.op.call.args[1], (int, float)):
            scale *= SCALES[func](number)
        elif func is aten.add.Tensor and mask is None and scale == 1.0 and (bias := added(scores)) is not None:
            mask = bias
        else:
            return NotImplemented
        scores = node.inputs[0]
    query, keys = scores.node.inputs  # type: ignore[union-attr]
    turned = source_of(keys)
    if turned is None or not query.is_map or len(query.shape) != 3 or turned.dtype != out.dtype:
        return NotImplemented
    if mask is not None and (mask := flat_mask(rec, mask, weights)) is None:
        return NotImplemented
    key = rec.decompose(lambda t: t.transpose(-2, -1), turned)
    if key is NotImplemented or weights.shape != (*query.shape[:2], turned.shape[-1]):
        return NotImplemented
    return attended(rec, Asked(query, key[0], value, mask, 0.0, False, scale, False), out, None, by_hand=True)


def called(v: Value) -> Any:
    """Call that makes a map, where that is local."""
    return v.node.op.call.func if v.node is not None and isinstance(v.node.op, Local) else None


def seen(v: Value) -> Value:
    """A map before it was viewed in another shape of the same elements."""
    while v.node is not None and isinstance(v.node.op, (Reshape, Expand)):
        source = v.node.inputs[0]
        if not source.is_map or math.prod(source.shape) != math.prod(v.shape):
            break
        v = source
    return v


def over_last(softmax: Value) -> bool:
    """True of a softmax over the last dimension, in the type of what it is given."""
    assert softmax.node is not None and isinstance(softmax.node.op, Local)
    _, dim, *rest = softmax.node.op.call.args
    return dim % len(softmax.shape) == len(softmax.shape) - 1 and not any(rest)


def added(scores: Value) -> Value | None:
    """The vector that is added to scores, as it is."""
    node = scores.node
    assert node is not None and isinstance(node.op, Local)
    if node.op.call.args != (Slot(0), Slot(1)) or node.op.call.kwargs or len(node.inputs) != 2:
        return None
    other = node.inputs[1]
    if other.node is not None and isinstance(other.node.op, Spread):
        other = other.node.inputs[0]
    return None if other.is_map else other


def source_of(keys: Value) -> Value | None:
    """The map that is read whole."""
    node = keys.node
    return (
        node.inputs[0] if node is not None and isinstance(node.op, (Gather, Uncut)) and node.inputs[0].is_map else None
    )


def flat_mask(rec: Recorder, mask: Value, weights: Value) -> Value | None:
    """A mask of all heads alike as what is added to weights (B, t, T)."""
    lead: Sequence[int] = mask.shape[:-2]
    if len(mask.shape) < 2 or math.prod(lead) != 1 or mask.shape[-2:] not in (weights.shape[1:], (1, weights.shape[2])):
        return None
    fake = rec.fake(mask.shape[-2:], mask.dtype, mask.device)
    found: Value = rec.vector(aten.reshape.default, [mask, list(mask.shape[-2:])], {}, [fake], name="view")[0]
    return found
