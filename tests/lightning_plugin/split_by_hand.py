"""Split networks in plain PyTorch, with nothing of the engine: tensors are cropped by hand, padded by hand, and joined.

A network is a `nn.Sequential` of convolutions, pooling, what acts on positions one by one, and `Residual` blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cuts = list[int]
Limits = list[tuple[int, int]]
Windows = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


class Impossible(Exception):
    """A split would be empty, or two readers want a map cut at different places."""


class Residual(nn.Module):
    """The sum of two branches."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


def numbers(m: Any, axis: int) -> tuple[int, int, int]:
    """(reach, stride, padding) of a window along an axis."""
    pick = lambda v: v if isinstance(v, int) else v[axis]  # noqa: E731
    dilation = pick(m.dilation) if hasattr(m, "dilation") else 1
    return dilation * (pick(m.kernel_size) - 1) + 1, pick(m.stride), pick(m.padding)


def limits(m: nn.Module, cuts: Cuts, axis: int) -> Limits:
    """From where to where the cuts of a module's input may lie, given those of its output."""
    if isinstance(m, Windows):
        reach, stride, padding = numbers(m, axis)
        ends = [(cut * stride - padding, (cut - 1) * stride + reach - padding) for cut in cuts]
        return [(min(e), max(e)) for e in ends]
    if isinstance(m, nn.Sequential):
        for part in reversed(list(m)[1:]):
            cuts = middle(limits(part, cuts, axis))
        return limits(m[0], cuts, axis)
    if isinstance(m, Residual):
        both = zip(limits(m.body, cuts, axis), limits(m.shortcut, cuts, axis), strict=True)
        return [(max(a[0], b[0]), min(a[1], b[1])) for a, b in both]
    return [(cut, cut) for cut in cuts]


def middle(found: Limits) -> Cuts:
    if any(lo > hi for lo, hi in found):
        raise Impossible
    return [math.ceil((lo + hi) / 2) for lo, hi in found]


def run(m: nn.Module, x: Tensor, cuts: list[Cuts]) -> Tensor:
    """A module on splits; ``cuts`` are those of its output, along both axes, without the ends."""
    if isinstance(m, Windows):
        return windows(m, x, cuts)
    if isinstance(m, nn.Sequential):
        after = [cuts]
        for part in reversed(list(m)[1:]):
            after.append([middle(limits(part, c, axis)) for axis, c in enumerate(after[-1])])
        for part, here in zip(m, reversed(after), strict=True):
            x = run(part, x, here)
        return x
    if isinstance(m, Residual):
        for axis, c in enumerate(cuts):
            middle(limits(m, c, axis))
        return run(m.body, x, cuts) + run(m.shortcut, x, cuts)
    out: Tensor = m(x)
    return out


def windows(m: Any, x: Tensor, cuts: list[Cuts]) -> Tensor:
    """One window operator: each split is cropped, padded as the paper has it, and computed without padding."""
    size = m(torch.zeros_like(x)).shape[2:]
    sides: list[list[tuple[int, int, int, int]]] = []
    for axis, c in enumerate(cuts):
        reach, stride, padding = numbers(m, axis)
        makes = [0, *c, size[axis]]
        reads = [0, *middle(limits(m, c, axis)), x.shape[2 + axis]]
        if any(a >= b for ends in (makes, reads) for a, b in itertools.pairwise(ends)):
            raise Impossible
        sides.append(
            [
                (lo, hi, lo + padding - first * stride, (end - 1) * stride + reach - padding - hi)
                for (lo, hi), (first, end) in zip(itertools.pairwise(reads), itertools.pairwise(makes), strict=True)
            ]
        )
    rows = []
    for top, bottom, above, below in sides[0]:
        row = []
        for left, right, before, behind in sides[1]:
            part = x[:, :, top:bottom, left:right]
            row.append(alone(m, part, (before, behind, above, below)))
        rows.append(torch.cat(row, 3))
    return torch.cat(rows, 2)


def alone(m: Any, x: Tensor, pads: tuple[int, int, int, int]) -> Tensor:
    if isinstance(m, nn.Conv2d):
        return F.conv2d(F.pad(x, pads), m.weight, m.bias, m.stride, 0, m.dilation, m.groups)
    if isinstance(m, nn.MaxPool2d):
        return F.max_pool2d(F.pad(x, pads, value=-math.inf), m.kernel_size, m.stride, 0, m.dilation)
    total = F.avg_pool2d(F.pad(x, pads), m.kernel_size, m.stride)
    if m.count_include_pad:
        return total
    return total / F.avg_pool2d(F.pad(torch.ones_like(x), pads), m.kernel_size, m.stride)


def split_step(net: nn.Sequential, until: int, x: Tensor, cuts_of: Callable[[int, int], Cuts]) -> Tensor:
    """A network whose first modules are split; ``cuts_of`` says where a map of a size is cut along an axis."""
    first, rest = net[:until], net[until:]
    with torch.no_grad():
        size = unchanged(first, x)
    cuts = [cuts_of(axis, n) for axis, n in enumerate(size)]
    for axis, c in enumerate(cuts):
        inner = middle(limits(first, c, axis))
        if any(a >= b for a, b in itertools.pairwise([0, *inner, x.shape[2 + axis]])):
            raise Impossible
    out: Tensor = rest(run(first, x, cuts))
    return out


def unchanged(net: nn.Sequential, x: Tensor) -> torch.Size:
    """The size of a result, without a trace in running statistics."""
    was = [m.training for m in net.modules()]
    size = net.eval()(x).shape[2:]
    for m, mode in zip(net.modules(), was, strict=True):
        m.training = mode
    return size
