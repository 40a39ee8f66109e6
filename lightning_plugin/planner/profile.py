"""What an operator keeps for backward, and what it costs: found by running it once on fake tensors of full size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Node, Value
from lightning_plugin.rules.base import ReduceOp, TileOp

#: Shapes of tiles are propagated under this mode; tables of positions are real tensors that meet the fake ones.
FAKES = FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True)
class Profile:
    """One node at full size.

    ``saves`` are the input maps (by place) whose memory it keeps, ``saves_output`` says whether it keeps its own
    result's, ``extra`` is how many bytes it keeps besides (pooling indices, masks). ``views`` is the place of the input
    map that its result shares memory with. ``flops`` and ``traffic`` (bytes read and written) are those of forward.
    """

    saves: tuple[int, ...]
    saves_output: bool
    extra: int
    views: int | None
    flops: int
    traffic: int


def profile(node: Node) -> Profile:
    """Run a node on fake tensors, with grad, and look at what autograd saves."""
    maps, vectors = node.maps, node.vectors
    with FAKES, torch.inference_mode(False), torch.enable_grad():
        tiles = [_fake(v) for v in maps]
        others = [_fake(v) for v in vectors]
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    counter = FlopCounterMode(display=False)
    try:
        with FAKES, torch.inference_mode(False), torch.enable_grad(), counter:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = _run(node, tiles, others)
    except (RuntimeError, NotImplementedError, TypeError):
        # An operator that has no fake form: assume the worst, that it keeps all it touches.
        traffic = sum(v.bytes for v in (*maps, *node.outputs))
        return Profile(tuple(range(len(maps))), True, 0, None, 0, traffic)
    places = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tiles)))}
    made = out.untyped_storage()._cdata if out is not None else -1
    known = {*places, made, *(t.untyped_storage()._cdata for t in others)}
    extra = sum(size for key, size in saved.items() if key not in known)
    return Profile(
        saves=tuple(sorted(places[k] for k in saved if k in places)),
        saves_output=made in saved and made not in places,
        extra=extra,
        views=places.get(made),
        flops=counter.get_total_flops(),
        traffic=sum(v.bytes for v in (*maps, *node.outputs)),
    )


def _run(node: Node, tiles: list[Tensor], vectors: list[Tensor]) -> Tensor | None:
    op = node.op
    if isinstance(op, ReduceOp):
        results = tuple(_like(v) for v in node.outputs)
        pulls = op.pull(Box.whole(node.maps[0].space.extent), tiles, vectors, results)
        return next((p for p in pulls if p is not None), None)
    assert isinstance(op, TileOp)
    return op.apply(Box.whole(node.outputs[0].space.extent), tiles, vectors)


def _like(v: Value) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _fake(v: Value) -> Any:
    t = _like(v)
    return t.requires_grad_() if v.requires_grad and (t.is_floating_point() or t.is_complex()) else t
