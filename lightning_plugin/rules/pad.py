"""Padding in all its modes, which is an index map: constant, reflect, replicate, circular; negative padding crops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.rules.channels import name_of, resized
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.slices import Run, Runs, remap, spatial
from lightning_plugin.rules.table import API, ATEN, Recorder

aten = torch.ops.aten


def padded(mode: str, size: int, before: int, after: int) -> Runs | None:
    """The index map of one axis, or None where the padding crops all of it away."""
    start = max(-before, 0)
    kept = size - start + min(after, 0)
    if kept < 1:
        return None
    before_from, after_from, step = {
        "constant": (None, None, 1),
        "reflect": (before, size - 2, -1),
        "replicate": (0, size - 1, 0),
        "circular": (start + kept - before, start, 1),  # PyTorch crops first, and wraps what is left
    }[mode]
    lead, trail = max(before, 0), max(after, 0)
    runs = [
        Run(0, lead, before_from, step),
        Run(lead, lead + kept, start),
        Run(lead + kept, lead + kept + trail, after_from, step),
    ]
    return tuple(run for run in runs if run.hi > run.lo)


def pad(rec: Recorder, x: Value, pads: Sequence[int], mode: str, fill: float, out: Tensor, name: str) -> Any:
    """``pads`` is in PyTorch's order, last dimension first."""
    rank = len(x.shape)
    pairs = {rank - 1 - i: (pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2)}
    pairs = {d: pair for d, pair in pairs.items() if any(pair)}
    maps = {d: padded(mode, x.shape[d], *pair) for d, pair in pairs.items() if spatial(x, d)}
    others = {d: pair for d, pair in pairs.items() if d not in maps}
    if out.dtype != x.dtype or (others and mode != "constant") or any(runs is None for runs in maps.values()):
        return NotImplemented
    found = remap(rec, x, {d: runs for d, runs in maps.items() if runs is not None}, name, fill)
    if found is None or not others:
        return NotImplemented if found is None else found
    flat = [n for d in reversed(range(rank)) for n in others.get(d, (0, 0))]
    return local(
        rec, aten.constant_pad_nd.default, [found, flat, fill], {}, out, resized(found.space, out.shape), name=name
    )


@ATEN.rule(aten.constant_pad_nd.default, kind="layout")
def constant_pad(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    fill = kwargs.get("value", args[2] if len(args) > 2 else 0.0)
    return pad(rec, args[0], args[1], "constant", fill, outs[0], "constant_pad")


@ATEN.rule(
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default,
    kind="layout",
)  # fmt: skip
def mirrored_pad(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    mode = "reflect" if name_of(func).startswith("reflection") else "replicate"
    return pad(rec, args[0], args[1], mode, 0.0, outs[0], f"{mode}_pad")


@API.rule(F.pad, kind="layout")
def circular_pad(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """PyTorch pads circularly with copies into an empty tensor, which cannot be read off its operators."""
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    x = given["input"]
    if given.get("mode", "constant") != "circular" or not x.is_map:
        return NotImplemented
    return pad(rec, x, given["pad"], "circular", 0.0, outs[0], "circular_pad")
