"""One training step of a random network, plain and tiled, and what differs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_plugin import LazyImage, materialize
from lightning_plugin.engine import Engine
from tests.exactness import TOLERANCE, compare, difference, flat
from tests.lightning_plugin.networks import Case


def objective(outputs: Sequence[Tensor], losses: Sequence[str], seed: int) -> Tensor:
    """A loss of several maps, its targets and weights drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for out, kind in zip(outputs, losses, strict=True):
        other = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        if kind == "weighted":
            total = total + (out * other).sum()
        elif kind == "square":
            total = total + (out * out).mean() + out.sum()
        elif kind == "target":
            total = total + F.mse_loss(out, other)
        else:
            classes = torch.randint(-1, out.shape[1], (out.shape[0], *out.shape[2:]), generator=generator)
            classes[(0,) * classes.dim()] = 0  # a mean over nothing is no number
            total = total + F.cross_entropy(out, classes, ignore_index=-1)
    return total


class Contiguous(torch.autograd.Function):
    """A tensor as it is, its cotangent made contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def mended(net: nn.Module) -> nn.Module:
    """A reference without two faults of PyTorch (seen in 2.13): the backward of an InstanceNorm of one image takes a
    cotangent in channels-last order for one in contiguous order (finite differences say so), and a GroupNorm with a
    bias and no weight has no backward ("tensor does not have a device")."""
    for module in net.modules():
        if isinstance(module, _InstanceNorm):
            module.register_forward_hook(lambda m, args, out: Contiguous.apply(out))
        if isinstance(module, nn.GroupNorm) and module.weight is None and module.bias is not None:
            del module._parameters["weight"]
            module.weight = torch.ones_like(module.bias.detach())  # type: ignore[assignment]
    return net


class Step:
    """What one step leaves behind."""

    def __init__(self, case: Case, engine: Engine | None, jitter: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.net = copy.deepcopy(case.net) if engine is not None else mended(copy.deepcopy(case.net))
        self.inputs = []
        for shape, grad in zip(case.shapes, case.grads, strict=True):
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.inputs.append((x * (1 + jitter * noise)).requires_grad_(grad))
        images = self.inputs
        if engine is not None:
            images = [LazyImage.from_tensor(x, engine=engine) for x in self.inputs]
        outputs = self.net(*images)
        loss = objective(outputs, case.losses, case.seed)
        if loss.requires_grad:
            loss.backward()
        self.loss = materialize(loss).detach()
        self.outputs = [materialize(o).detach() for o in flat(outputs)]


#: What loss, outputs and gradients are compared with where they are smaller.
LEAST = 1e-3


def differences(actual: Step, expected: Step) -> dict[str, float]:
    """Errors of loss, outputs, parameters', inputs' gradients and buffers.

    Numbers of these networks are of the order of one, and sums of them that cancel out are rounding of that order, as
    the gradient of a bias before a BatchNorm, or what a BatchNorm makes of a constant: where it is the largest there
    is, nothing else says so.
    """
    everything = [t for t in (*expected.net.parameters(), *expected.inputs) if t.grad is not None]
    floor = 1e-3 * max((t.grad.abs().max().item() for t in everything if t.grad.numel()), default=0.0)
    floor = max(floor, LEAST)
    found = {"loss": difference(actual.loss, expected.loss, floor=LEAST)}
    found |= compare(expected.net, actual.net, actual.outputs, expected.outputs, (None, None), floor=floor)
    for i, (a, e) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        found[f"output {i}"] = difference(a, e, LEAST)
    for i, (a, e) in enumerate(zip(actual.inputs, expected.inputs, strict=True)):
        if (a.grad is None) != (e.grad is None):
            given = a.grad if e.grad is None else e.grad
            found[f"input {i}"] = float("inf") if given.any() else 0.0
        elif e.grad is not None:
            found[f"input {i}"] = difference(a.grad, e.grad, floor)
    return found


def sensitivity(case: Case) -> float:
    """What rounding the inputs alone does to plain PyTorch's own result: the largest relative change."""
    plain = Step(case, None)
    return max(differences(Step(case, None, jitter=2e-16), plain).values(), default=0.0)


def wrong(case: Case, found: dict[str, float]) -> dict[str, float]:
    """Errors that rounding cannot explain.

    A few random networks multiply a rounding error by more than the tolerance allows: there the bound is a hundred
    times what one rounding of the inputs does to plain PyTorch itself.
    """
    suspects = {name: e for name, e in found.items() if not e < TOLERANCE}
    if not suspects:
        return {}
    bound = max(TOLERANCE, 100 * sensitivity(case))
    return {name: e for name, e in suspects.items() if not e < bound}
