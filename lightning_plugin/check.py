"""`check`: is the tiled result the plain one, on the user's own model?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_plugin.module import TiledModule

#: Errors under this are floating-point reassociation, in float64.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Report:
    """What `check` found: the error of every tensor, what had to run whole, and whether all is well."""

    errors: dict[str, float]
    barriers: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return all(e < TOLERANCE for e in self.errors.values())

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        width = max(map(len, self.errors), default=0)
        lines = [
            f"{name.ljust(width)}  {error:.1e}{'' if error < TOLERANCE else '   <-- differs'}"
            for name, error in self.errors.items()
        ]
        lines += [f"run whole, for want of a tiling rule: {b}" for b in self.barriers]
        lines += [f"not compared: {s}" for s in self.skipped]
        lines.append("exact" if self.exact else f"NOT exact: errors of {TOLERANCE:g} and more are not reassociation")
        return "\n".join(lines)


def check(
    module: nn.Module, small_input: Tensor | Sequence[int], tiles: int | Sequence[int] = (3, 2), seed: int = 0
) -> Report:
    """Compare one tiled step of a module with one plain step, in float64, and report the error of every tensor.

    The module itself is left alone: copies are compared, in the mode it is in. ``small_input`` is a tensor, or the
    shape of one, that plain PyTorch can hold. Networks with dropout differ by their masks and are compared with
    dropout switched off; the report says so. The error of a tensor is max|a-b| / max(max|b|, 1e-3 × the largest
    gradient in the network)::

        print(check(model, (1, 3, 300, 260)))
    """
    plain, twin = copy.deepcopy(module).double(), copy.deepcopy(module).double()
    skipped = tuple(f"{name}: dropout is switched off for the comparison" for name in _quiet(plain))
    _quiet(twin)
    torch.manual_seed(seed)
    x = small_input if isinstance(small_input, Tensor) else torch.randn(tuple(small_input))
    x = x.detach().double().requires_grad_()
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    expected = _tensors(plain(x))
    tiled = TiledModule(twin, tiles=tiles)
    torch.manual_seed(seed)
    actual = _tensors(tiled(y))
    weights = [torch.randn_like(e) for e in expected]
    for outputs in (expected, actual):
        total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
    errors = {
        f"output {i}" if len(expected) > 1 else "output": _error(a, e)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True))
    }
    gradients = {
        name: (p.grad, q.grad)
        for (name, p), (_, q) in zip(plain.named_parameters(), twin.named_parameters(), strict=True)
    }
    gradients["input"] = (x.grad, y.grad)
    largest = max((float(e.abs().max()) for e, _ in gradients.values() if e is not None and e.numel()), default=0.0)
    for name, (e, a) in gradients.items():
        if e is not None or a is not None:
            errors[f"gradient of {name}"] = _error(a, e, 1e-3 * largest)
    for (name, e), (_, a) in zip(plain.named_buffers(), twin.named_buffers(), strict=True):
        errors[f"buffer {name}"] = _error(a, e)
    return Report(errors, tiled.settings.barriers, skipped)


def _quiet(module: nn.Module) -> list[str]:
    """Switch off dropout; returns the paths of the modules concerned."""
    found = []
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.training and child.p:
            child.eval()
            found.append(name or type(child).__name__)
    return found


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]


def _error(actual: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    if actual is None or expected is None:
        there = expected if actual is None else actual
        return 0.0 if there is None or not there.any() else float("inf")
    if not expected.numel():
        return 0.0
    difference = float((actual.detach().double() - expected.detach().double()).abs().max())
    scale = max(float(expected.detach().abs().max()), floor)
    return difference / scale if scale else difference
