"""Adaptive pooling to any size.

The bins of adaptive pooling differ in length and may overlap, so there is no window to slide. A result that is small
against its bins (seven by seven of a whole slide) is a vector to which every tile adds (`adaptive_sums`); a larger one
is a map, and a tile of it reads the bins it needs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.ops import Along
from lightning_plugin.rules.adaptive_sums import BinMax, BinMean, Pooled, follow, largest
from lightning_plugin.rules.channels import name_of
from lightning_plugin.rules.interpolate import Resample
from lightning_plugin.rules.sampling import Bins
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.window import squeezed_axes, windowed_at

aten = torch.ops.aten


@dataclass(frozen=True)
class AdaptiveMax(Along):
    """The largest value of each bin, or, with ``index``, its flat position among the pooled dimensions of the map."""

    kind: ClassVar[str] = "resample"
    maps: tuple[Bins, ...]
    dims: tuple[int, ...]
    index: bool = False

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """The bins, from the first input on; where they lie, if positions are asked for."""
        return (lo, hi) if self.index else super().mark(axis, lo, hi)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """The last axis first: of equal values in a bin, the first in row-major order wins, as PyTorch has it."""
        x = tiles[0]
        (held,) = self.need(box)
        where = None
        step = 1
        for sampler, a, d in reversed(list(zip(self.maps, self.axes, self.dims, strict=True))):
            index = sampler.members(box.lo[a], box.hi[a])[0]
            x, choice = largest(x, d, (index - held.lo[a]).to(x.device))
            if self.index:
                where = follow(where, choice, index.to(x.device), held.lo[a], d, step)
                step *= sampler.size
        return x if where is None else where


def adaptive(rec: Recorder, x: Value, size: Sequence[int], outs: Sequence[Tensor], maximum: bool, name: str) -> Any:
    count = len(size)
    found = squeezed_axes(x, count)
    if found is None:
        return NotImplemented
    axes, used = found
    if any(size[i] != 1 for i in range(count) if i not in used) or not all(size):
        return NotImplemented
    rank = len(x.shape)
    dims = tuple(rank - count + i for i in used)
    bins = tuple(Bins(x.shape[d], outs[0].shape[d]) for d in dims)
    if small(bins) and set(dims) == set(x.space.space):
        pooled = Pooled(bins, axes, dims, outs[0].dtype)
        return rec.emit((BinMax if maximum else BinMean)(pooled), [x], outs, None, name)
    layout = windowed_at(x, used, count, outs[0].shape)
    if not maximum:
        return rec.emit(Resample(bins, axes, dims), [x], outs, layout, name)
    values = rec.emit(AdaptiveMax(bins, axes, dims), [x], outs[:1], layout, name)
    return *values, *rec.emit(AdaptiveMax(bins, axes, dims, True), [x], outs[1:], layout, f"{name} indices")


def small(bins: Sequence[Bins]) -> bool:
    """True if the whole result is no larger than what one of its bins reads."""
    return math.prod(b.out for b in bins) <= math.prod(b.size // b.out for b in bins)


@ATEN.rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, kind="resample")
def adaptive_avg_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    return adaptive(rec, args[0], args[1], outs, False, name_of(func).removeprefix("_"))


@ATEN.rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """To more than one position."""
    x, size = args
    return NotImplemented if all(s == 1 for s in size) else adaptive(rec, x, size, outs, True, "adaptive_max_pool")
