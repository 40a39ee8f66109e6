"""Run nodes of kept segments whole, with ordinary autograd.

A kept map is an ordinary tensor in the frame's ``whole_maps``. It is dropped when its last reader has run; autograd
saves what backward needs, as in plain PyTorch.

BatchNorm is one call of PyTorch's kernel here; tiled, it is a statistic and a normalisation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.frame import Frame
from lightning_plugin.execute.gradients import live_pairs, pull_back
from lightning_plugin.graph import Node, Value, with_requires_grad
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import ReduceOp, Source, Spread, TileOp, accumulation_dtype, has_gradients
from lightning_plugin.private import first_order, without_view
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.rules.norm import Normalize, is_channels_last, register_layout_hook
from lightning_plugin.rules.reductions import VarMean
from lightning_plugin.team import Team


class GatherFunction(torch.autograd.Function):
    """A boundary as one ordinary tensor, whose gradient is added to the boundary's cotangent.

    All ranks of a ``team`` have the same gradient, and cotangents are summed over ranks: only the first one adds it.
    """

    @staticmethod
    def forward(ctx: Any, value: Value, boundary: Boundary, token: Tensor, team: Team | None) -> Tensor:
        ctx.cotangent = boundary.cotangent
        ctx.whole = boundary.whole
        ctx.ledger = boundary.ledger
        ctx.team = team
        ctx.set_materialize_grads(False)
        with watched(boundary.ledger):
            out = boundary.read(boundary.whole)
        if not value.requires_grad:
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        if ctx.team is None or ctx.team.is_first:
            with watched(ctx.ledger):
                ctx.cotangent.add(ctx.whole, grad)
        return None, None, torch.zeros((), device=grad.device), None


def run_node(node: Node, frame: Frame, fused: Mapping[int, Node], last_reads: Collection[Value]) -> None:
    """Run a node whole, and drop the maps that it is the last to read (``last_reads``). A statistic that is fused with
    its normalisation is computed there (see `find_batch_norms`)."""
    partner = fused.get(node.serial)
    if partner is not None and isinstance(node.op, ReduceOp):
        return
    ledger = frame.step.ledger
    tiles = [whole_map(v, frame) for v in node.maps]
    # Before the node runs: an input that is written in place gets another one.
    before = {t.grad_fn for t in (*tiles, *frame.ordinary_tensors(node.vectors))}
    with torch.set_grad_enabled(any(v.requires_grad for v in node.outputs)):
        if partner is not None:
            vectors = [frame.vector(v) for v in node.vectors[2:]]
            result, *moments = batch_norm(partner, node, tiles[0], vectors)
            frame.whole_maps[node.outputs[0]] = result
            for v, moment in zip(partner.outputs, moments, strict=True):
                frame.vectors[v] = moment.to(v.dtype)
        elif isinstance(node.op, ReduceOp):
            vectors = [frame.vector(v) for v in node.vectors]
            box = Box.whole(node.maps[0].space.extent)
            results = ReduceFunction.apply(node.op, box, len(tiles), ledger, *tiles, *vectors)
            frame.vectors.update(zip(node.outputs, results, strict=True))
        else:
            assert isinstance(node.op, TileOp)
            vectors = [frame.vector(v) for v in node.vectors]
            frame.whole_maps[node.outputs[0]] = run_tile_op(node, frame, tiles, vectors, last_reads)
    for result in frame.ordinary_tensors(node.outputs):
        if ledger is not None:
            ledger.hook_gradients(result, before)
        if frame.step.watch is not None:
            frame.step.watch.check(node, result)
    del tiles
    for v in last_reads:
        frame.whole_maps.pop(v, None)


def run_tile_op(
    node: Node, frame: Frame, tiles: list[Tensor], vectors: list[Tensor], last_reads: Collection[Value]
) -> Tensor:
    op = node.op
    assert isinstance(op, TileOp)
    box = Box.whole(node.outputs[0].space.extent)
    source = node.maps[0]
    if (
        node.inplace is not None
        and source not in frame.boundaries
        and source in last_reads
        and node.maps.count(source) == 1
        and not _is_users_tensor(source)
        and not source.node.op.returns_view  # type: ignore[union-attr]
    ):
        return op.in_place(node.inplace, tiles, vectors)  # type: ignore[attr-defined,no-any-return]
    found = op.apply_whole(box, tiles, vectors)
    if found is not None:
        return found
    boxes = op.need(box)
    tiles = [v.space.narrow(t, Box.whole(v.space.extent), b) for v, t, b in zip(node.maps, tiles, boxes, strict=True)]
    return op.apply(box, tiles, vectors)


def _is_users_tensor(v: Value) -> bool:
    """True if a map is a tensor of the user, which must not be written to."""
    return v.node is None or isinstance(v.node.op, (Source, Spread))


def whole_map(v: Value, frame: Frame) -> Tensor:
    """Return a map as one tensor: an ordinary one, a boundary read whole, or an image."""
    found = frame.ordinary_tensor(v)
    if found is not None:
        return found
    if v in frame.boundaries:
        with torch.set_grad_enabled(v.requires_grad):
            found = GatherFunction.apply(v, frame.boundaries[v], frame.tokens[v], frame.step.team)
    elif v in frame.bindings.images:
        image = frame.bindings.images[v]
        if image.on_device is not None:
            found = with_requires_grad(image.on_device, v.requires_grad)
        else:
            with frame.step.progress.waiting("input"):
                found = image.read(Box.whole(v.space.extent))
        if frame.step.watch is not None and v.node is not None:
            frame.step.watch.check(v.node, found)
    else:
        raise AssertionError(f"{v.label} is neither stored nor kept")
    frame.whole_maps[v] = found
    return found


class ReduceFunction(torch.autograd.Function):
    """A reduce operator on one tile that is the whole map."""

    @staticmethod
    def forward(
        ctx: Any, op: ReduceOp, box: Box, maps: int, ledger: Ledger | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        tiles, vectors = inputs[:maps], inputs[maps:]
        results = tuple(map(without_view, op.finish(op.partial(box, tiles, vectors), vectors)))
        ctx.op, ctx.box, ctx.maps, ctx.ledger = op, box, maps, ledger
        ctx.results = [r.clone() for r in results]
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r in results if not has_gradients(r.dtype)))
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [
            t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        with watched(ctx.ledger):
            pulls = ctx.op.pull_with_grad(ctx.box, inputs[: ctx.maps], inputs[ctx.maps :], ctx.results)
            return (None, None, None, None, *pull_back(live_pairs(pulls, grads), inputs))


def find_batch_norms(nodes: Sequence[Node], among: Sequence[Node]) -> dict[int, Node]:
    """Find the pairs of a statistic and a normalisation among ``nodes`` that are a BatchNorm: no other node among all
    nodes of the run, ``among``, reads the statistic. Each node's partner by its serial number."""
    readers: dict[Value, list[Node]] = {}
    for n in among:
        for v in n.vectors:
            readers.setdefault(v, []).append(n)
    here = {n.serial for n in nodes}
    found: dict[int, Node] = {}
    for n in nodes:
        if not isinstance(n.op, VarMean) or n.op.correction:
            continue
        users = {u.serial: u for v in n.outputs for u in readers.get(v, ())}
        if len(users) != 1:
            continue
        (user,) = users.values()
        if isinstance(user.op, Normalize) and not user.op.fold and user.serial in here and is_batch_norm(n, user):
            found[n.serial] = user
            found[user.serial] = n
    return found


def is_batch_norm(statistics: Node, user: Node) -> bool:
    x = statistics.maps[0]
    variance, mean = statistics.outputs
    return (
        user.maps == (x,)
        and user.vectors[:2] == (mean, variance)
        and statistics.op.dims == tuple(d for d in range(len(x.shape)) if d != 1)  # type: ignore[attr-defined]
    )


def batch_norm(statistics: Node, user: Node, x: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Run a BatchNorm, and return (result, variance, mean); ``vectors`` are its weight and bias, if it has them."""
    op, size = user.op, statistics.op.size  # type: ignore[attr-defined]
    assert isinstance(op, Normalize)
    rest = list(vectors)
    weight = rest.pop(0) if op.weight else None
    bias = rest.pop(0) if op.bias else None
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    # With a momentum of one, the kernel returns this batch's statistics as running statistics.
    mean = torch.zeros(x.shape[1], dtype=accumulation_dtype(x.dtype), device=x.device)
    unbiased = torch.zeros_like(mean)
    # The kernel needs all vectors in the type of the statistics; in half precision the weight has another one.
    weight, bias = (None if v is None else v.to(mean.dtype) for v in (weight, bias))
    out = torch.batch_norm(x, weight, bias, mean, unbiased, True, 1.0, op.eps, torch.backends.cudnn.enabled)
    out = register_layout_hook(out, is_channels_last(x))
    return out, unbiased * ((size - 1) / size), mean
