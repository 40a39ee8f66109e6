"""Memory and work of one operator, found by running it once on fake tensors of full size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.fakes import MODES
from lightning_plugin.graph import Node, Value
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import Barrier, ReduceOp, TileOp, has_gradients
from lightning_plugin.private import FlopCounter, storage_key, tree_leaves


@dataclass(frozen=True)
class Profile:
    """Figures of one node at full size.

    Attributes:
        saves: Places of the input maps whose memory it saves for backward; of a barrier, of its inputs.
        saves_output: It saves its own result.
        extra: Bytes that it saves besides (pooling indices, masks).
        views: Place of the input map whose memory its result shares; None if it has memory of its own.
        flops: Floating-point operations of forward.
        traffic: Bytes that forward reads and writes.
        scratch: Bytes that forward needs for a moment beyond its inputs and results.
        scratch_backward: Bytes that backward needs for a moment beyond the gradients it is given and makes.
    """

    saves: tuple[int, ...]
    saves_output: bool
    extra: int
    views: int | None
    flops: int
    traffic: int
    scratch: int = 0
    scratch_backward: int = 0

    @property
    def work(self) -> int:
        """Measure of forward's work, comparable between operators: 0 for a view."""
        return 0 if self.views is not None else self.flops or self.traffic


def profile(node: Node) -> Profile:
    """Run a node on fake tensors, with grad, and look at what autograd saves."""
    traffic = sum(v.bytes for v in (*node.maps, *node.outputs))
    try:
        with torch.inference_mode(False), MODES.planning:
            return Trial(node).profile(traffic)
    except (RuntimeError, NotImplementedError, TypeError):
        # An operator that has no fake form: assume the worst, that it keeps all it touches.
        given = node.inputs if isinstance(node.op, Barrier) else node.maps
        return Profile(tuple(range(len(given))), True, 0, None, 0, traffic)


class Trial:
    """One run of a node's forward and backward under a ledger."""

    def __init__(self, node: Node) -> None:
        self.node = node
        whole = isinstance(node.op, Barrier)
        self.maps = [_fake(v) for v in (node.inputs if whole else node.maps)]
        self.vectors = [_fake(v) for v in (() if whole else node.vectors)]
        self.ledger = Ledger(node.outputs[0].device, fakes=True)
        for t in (*self.maps, *self.vectors):
            self.ledger.ignore(t)
        self.saved: dict[int, int] = {}

    def pack(self, t: Tensor) -> Tensor:
        """Note a tensor that autograd saves."""
        self.saved[storage_key(t)] = t.untyped_storage().nbytes()
        return t

    def profile(self, traffic: int) -> Profile:
        counter = FlopCounter()
        ledger = self.ledger
        with torch.enable_grad(), watched(ledger), counter:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t):
                out = self.run()
            scratch = ledger.peak - ledger.live
        flops = counter.get_total_flops()
        backward = self.backward(out)
        results: list[Tensor] = [o for o in out if o is not None]
        places = {storage_key(t): i for i, t in reversed(list(enumerate(self.maps)))}
        made = storage_key(results[0]) if results else -1
        known = {*places, made, *(storage_key(t) for t in self.vectors)}
        return Profile(
            saves=tuple(sorted(places[k] for k in self.saved if k in places)),
            saves_output=made in self.saved and made not in places,
            extra=sum(size for key, size in self.saved.items() if key not in known),
            views=places.get(made),
            flops=flops,
            traffic=traffic,
            scratch=scratch,
            scratch_backward=backward,
        )

    def run(self) -> list[Tensor | None]:
        """Results of the node's forward at full size."""
        op, node = self.node.op, self.node
        if isinstance(op, ReduceOp):
            results = tuple(_like(v) for v in node.outputs)
            for r in results:
                self.ledger.ignore(r)
            return list(op.pull_with_grad(Box.whole(node.maps[0].space.extent), self.maps, self.vectors, results))
        if isinstance(op, Barrier):
            return [t for t in tree_leaves(op.run(self.maps)) if isinstance(t, Tensor)]
        assert isinstance(op, TileOp)
        return [op.apply(Box.whole(node.outputs[0].space.extent), self.maps, self.vectors)]

    def backward(self, out: list[Tensor | None]) -> int:
        """Bytes that backward needs for a moment, beyond the gradients it is given and makes."""
        wanted = [t for t in (*self.maps, *self.vectors) if t.requires_grad]
        live = [o for o in out if o is not None and o.requires_grad]
        if not wanted or not live:
            return 0
        ledger = self.ledger
        cotangents = [torch.empty_like(o) for o in live]
        for c in cotangents:
            ledger.ignore(c)
        before = ledger.live
        ledger.begin()
        with watched(ledger):
            found = torch.autograd.grad(live, wanted, cotangents, allow_unused=True)
        made = sum(g.numel() * g.element_size() for g in found if g is not None)  # type: ignore[misc, redundant-expr]
        return max(0, ledger.peak - before - made)


def _like(v: Value) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _fake(v: Value) -> Any:
    t = _like(v)
    return t.requires_grad_() if v.requires_grad and has_gradients(t.dtype) else t
