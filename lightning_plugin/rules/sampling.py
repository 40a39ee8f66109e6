"""Resampling along one axis: the input positions that an output position mixes, and their weights.

The formulas are those that PyTorch documents for `torch.nn.functional.interpolate`. Coordinates are computed in float64
from positions in the whole map, so that they are as exact at the end of a long axis as at its beginning. Nearest
neighbours depend on the rounding of PyTorch's own arithmetic: PyTorch resamples a ramp of indices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from lightning_plugin.private import declare_constants, tree_leaves, without_modes

aten = torch.ops.aten
P = ParamSpec("P")
T = TypeVar("T")


def on_real_tensors(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function on real tensors within a fake-tensor mode too: positions do not depend on data."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with without_modes():
            found = function(*args, **kwargs)
        declare_constants([t for t in tree_leaves(found) if isinstance(t, Tensor)])
        return found

    return run


@dataclass(frozen=True, slots=True)
class Sampler(ABC):
    """One axis of ``size`` positions, resampled to ``out``. The inputs of later outputs never begin or end earlier."""

    size: int
    out: int

    @abstractmethod
    def taps(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return inputs (int64) and weights (float64) of outputs ``[lo, hi)``, both of shape (outputs, taps)."""

    @abstractmethod
    def need(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the interval of inputs, inside the map, that outputs ``[lo, hi)`` mix."""

    @on_real_tensors
    def mark(self, lo: int, hi: int) -> Hashable:
        """Taps of outputs ``[lo, hi)``, relative to their first input."""
        index, weight = self.taps(lo, hi)
        return str((index - self.need(lo, hi)[0]).tolist()), str(weight.tolist())


@dataclass(frozen=True, slots=True)
class Scaled(Sampler):
    """Interpolation.

    Attributes:
        factor: The user's scale, if PyTorch uses it in place of the sizes.
        align: As ``align_corners`` of PyTorch.
    """

    factor: float | None = None
    align: bool = False

    @property
    def scale(self) -> float:
        """Distance in the input between neighbours in the output."""
        if self.align:
            return (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
        return 1 / self.factor if self.factor is not None and self.factor > 0 else self.size / self.out

    @overload
    def source(self, output: float) -> float: ...
    @overload
    def source(self, output: Tensor) -> Tensor: ...
    def source(self, output: float | Tensor) -> float | Tensor:
        """Return the coordinates of outputs among the inputs."""
        return output * self.scale if self.align else (output + 0.5) * self.scale - 0.5


@dataclass(frozen=True, slots=True)
class Linear(Scaled):
    def need(self, lo: int, hi: int) -> tuple[int, int]:
        if self.out == self.size:
            return lo, hi
        first, last = (max(self.source(float(o)), 0.0) for o in (lo, hi - 1))
        return min(math.floor(first), self.size - 1), min(math.floor(last) + 2, self.size)

    @on_real_tensors
    def taps(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if self.out == self.size:  # PyTorch copies, whatever the factor
            at = torch.arange(lo, hi)
            return at.unsqueeze(1), torch.ones(len(at), 1, dtype=torch.float64)
        source = self.source(outputs(lo, hi)).clamp(min=0)
        left = source.floor().clamp(max=self.size - 1)
        part = (source - left).clamp(max=1)
        index = left.long()
        return (
            torch.stack([index, (index + 1).clamp(max=self.size - 1)], 1),
            torch.stack([1 - part, part], 1),
        )


@dataclass(frozen=True, slots=True)
class Cubic(Scaled):
    """Cubic convolution with a = -3/4, over four inputs; inputs beyond the border repeat the last one."""

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        first, last = (math.floor(self.source(float(o))) for o in (lo, hi - 1))
        return min(max(first - 1, 0), self.size - 1), min(max(last + 2, 0), self.size - 1) + 1

    @on_real_tensors
    def taps(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        source = self.source(outputs(lo, hi))
        left = source.floor()
        part = (source - left).unsqueeze(1)
        offsets = torch.arange(-1, 3)
        index = (left.long().unsqueeze(1) + offsets).clamp(0, self.size - 1)
        return index, cubic((part - offsets).abs(), -0.75)


def outputs(lo: int, hi: int) -> Tensor:
    return torch.arange(lo, hi, dtype=torch.float64)


def cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' kernel at distances >= 0."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))


def triangle(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0)


@dataclass(frozen=True, slots=True)
class Antialiased(Scaled):
    """Triangle (``kernel_reach`` 1) or cubic (2), stretched to the distance of outputs, normalised at borders."""

    kernel_reach: int = 1

    @property
    def support(self) -> float:
        return self.kernel_reach * max(self.scale, 1.0)

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        first, last = (lo + 0.5) * self.scale, (hi - 0.5) * self.scale
        return max(int(first - self.support + 0.5), 0), min(int(last + self.support + 0.5), self.size)

    @on_real_tensors
    def taps(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        centre = (outputs(lo, hi) + 0.5) * self.scale
        first = (centre - self.support + 0.5).trunc().clamp(min=0).long().unsqueeze(1)
        end = (centre + self.support + 0.5).trunc().clamp(max=self.size).long().unsqueeze(1)
        index = first + torch.arange(math.ceil(self.support) * 2 + 1)
        distance = ((index - centre.unsqueeze(1) + 0.5) / max(self.scale, 1.0)).abs()
        weight = triangle(distance) if self.kernel_reach == 1 else cubic(distance, -0.5)
        weight = torch.where(index < end, weight, 0.0)
        return torch.minimum(index, end - 1), weight / weight.sum(1, keepdim=True)


class Rounding(Enum):
    """Arithmetic by which PyTorch finds nearest neighbours; it depends on type, size and memory format."""

    DOUBLE = "axis by axis, in float64"
    SINGLE = "axis by axis, in float32"
    DIRECT = "in float32, with a shortcut for equal sizes and for a factor of two"


@dataclass(frozen=True, slots=True)
class Nearest(Sampler):
    """Nearest neighbour, as PyTorch finds it on a device."""

    factor: float | None
    mode: str
    rounding: Rounding
    device: str = "cpu"

    def table(self, rounding: Rounding | None = None) -> Tensor:
        """Return the input position of each output."""
        return nearest_indices(self.size, self.out, self.factor, self.mode, rounding or self.rounding, self.device)

    @on_real_tensors
    def need(self, lo: int, hi: int) -> tuple[int, int]:
        table = self.table()
        return int(table[lo]), int(table[hi - 1]) + 1

    @on_real_tensors
    def taps(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        index = self.table()[lo:hi].unsqueeze(1)
        return index, torch.ones(index.shape, dtype=torch.float64)

    @property
    def repeats(self) -> int | None:
        """Number of times that each input is repeated, if it is the same in each arithmetic; else None."""
        times = self.out // self.size
        if times * self.size != self.out:
            return None
        plain = torch.arange(self.out) // times
        return times if all(torch.equal(self.table(rounding), plain) for rounding in Rounding) else None


@lru_cache(maxsize=64)
@on_real_tensors
def nearest_indices(size: int, out: int, factor: float | None, mode: str, rounding: Rounding, device: str) -> Tensor:
    """Return the nearest neighbours by resampling a ramp of indices on the device."""
    # On CUDA positions are float32, whatever the type of the map; a ramp in float64 is exact at any length.
    single = rounding is Rounding.SINGLE and torch.device(device).type != "cuda"
    ramp = torch.arange(size, dtype=torch.float32 if single else torch.float64, device=device)
    exact = mode == "nearest-exact"
    with torch.inference_mode(False), torch.no_grad():
        if rounding is not Rounding.DIRECT:
            line = aten._upsample_nearest_exact1d if exact else aten.upsample_nearest1d
            return line.default(ramp.view(1, 1, size), [out], factor).view(-1).long().cpu()
        area = aten._upsample_nearest_exact2d if exact else aten.upsample_nearest2d
        image = ramp.view(1, 1, size, 1).expand(1, 4, size, 1).contiguous(memory_format=torch.channels_last)
        return area.default(image, [out, 1], factor, None)[0, 0].reshape(-1).long().cpu()


def mix(x: Tensor, dim: int, index: Tensor, weight: Tensor) -> Tensor:
    """Return weighted sums of positions along ``dim``; ``index`` and ``weight`` have shape (outputs, taps)."""
    outputs, taps = index.shape
    index, weight = index.to(x.device), weight.to(x)
    if taps == 1:  # its weight is one
        return x.index_select(dim, index[:, 0])
    tail = [1] * (x.dim() - 1 - dim)
    if taps <= 4:
        total = None
        for t in range(taps):
            part = x.index_select(dim, index[:, t]) * weight[:, t].view(-1, *tail)
            total = part if total is None else total + part
        assert total is not None
        return total
    chosen = x.index_select(dim, index.reshape(-1)).unflatten(dim, (outputs, taps))
    return (chosen * weight.view(outputs, taps, *tail)).sum(dim + 1)
