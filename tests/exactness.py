"""Tiled against plain PyTorch, in the norm of the design: max|a-b| / max(max|b|, 1e-3 x the largest gradient)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from lightning_plugin.engine import Engine
from lightning_plugin.options import Options
from lightning_plugin.plans import Planner

TOLERANCE = 1e-9


def difference(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The error of one tensor."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.is_complex() != expected.is_complex():
        raise AssertionError(f"type {actual.dtype}, expected {expected.dtype}")
    if expected.numel() == 0:
        return 0.0
    actual, expected = real(actual), real(expected)
    scale = max(expected.abs().max().item(), floor)
    error = (actual.double() - expected.double()).abs().max().item()
    return error / scale if scale > 0 else error


def real(t: Tensor) -> Tensor:
    """Complex numbers as pairs; real ones as they are."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def errors(
    net: nn.Module,
    shape: Sequence[int],
    tiles: Any = (3, 2),
    backward_tiles: Any = (2, 3),
    loss: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    engine: Any = None,
) -> dict[str, float]:
    """Errors of output, input gradient, every parameter's gradient and every buffer, after one step in float64."""
    torch.manual_seed(seed)
    net = net.double()
    net.zero_grad()
    other = copy.deepcopy(net)
    x = torch.randn(tuple(shape), dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    torch.manual_seed(seed + 1)  # the small masks of stochastic depth are drawn in the user's own order
    expected = net(x)
    torch.manual_seed(seed + 1)
    actual = other(LazyImage.from_tensor(twin, engine=engine or asked(tiles, backward_tiles)))
    weights = [torch.randn_like(real(e)) for e in flat(expected)]
    objective = loss or (
        lambda out: sum(((real(o) * w).sum() for o, w in zip(flat(out), weights, strict=True)), torch.zeros(()))
    )
    losses = objective(expected), objective(actual)
    for value in losses:
        value.backward()
    found = compare(net, other, [materialize(a) for a in flat(actual)], flat(expected), (twin.grad, x.grad))
    return {"loss": difference(materialize(losses[1]).detach(), losses[0].detach()), **found}


def asked(tiles: Any = None, backward_tiles: Any = None, **words: Any) -> Engine:
    """An engine with a user's options."""
    return Engine(Planner(Options.parse({"tiles": tiles, "backward_tiles": backward_tiles, **words})))


def compare(
    net: nn.Module,
    other: nn.Module,
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    inputs: tuple[Any, Any],
    floor: float | None = None,
) -> dict[str, float]:
    found = {
        f"output {i}": difference(a.detach(), e.detach()) for i, (a, e) in enumerate(zip(actual, expected, strict=True))
    }
    grads = {n: p.grad for n, p in net.named_parameters()}
    largest = max(
        [g.abs().max().item() for g in [*grads.values(), inputs[1]] if g is not None and g.numel()], default=0.0
    )
    floor = 1e-3 * largest if floor is None else floor
    for name, p in other.named_parameters():
        expected_grad = grads[name]
        if expected_grad is None or p.grad is None:
            found[name] = 0.0 if expected_grad is p.grad else float("inf")  # an optimizer tells zeros from None
            continue
        found[name] = difference(p.grad, expected_grad, floor)
    if inputs[1] is not None:
        found["input gradient"] = difference(inputs[0], inputs[1], floor)
    for (name, a), (_, e) in zip(other.named_buffers(), net.named_buffers(), strict=True):
        found[f"buffer {name}"] = difference(a, e)
    return found


def flat(out: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]


def assert_exact(*args: Any, **kwargs: Any) -> dict[str, float]:
    found = errors(*args, **kwargs)
    wrong = {name: e for name, e in found.items() if not e < TOLERANCE}
    assert not wrong, f"tiled and plain differ: {wrong}"
    return found


def assert_same_step(plain: nn.Module, tiled: nn.Module, expected: Tensor, actual: Tensor) -> None:
    """Pull two losses back, and compare them and the gradients of two networks of the same weights."""
    expected.backward()
    actual.backward()
    assert difference(actual, expected) < TOLERANCE
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            assert difference(q.grad, p.grad, 1e-3) < TOLERANCE
