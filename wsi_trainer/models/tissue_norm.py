"""BatchNorm whose statistics are those of the tissue alone (`model.batchnorm_over: tissue`).

Four fifths of a slide are often background, and a BatchNorm over all of it mostly measures how much there is; this one
takes mean and variance over the positions that stand for tissue, and normalises every position with them. Which
positions these are is what the head may pool over too: the cells of the network's own map, `stride` × `stride` pixels
each, that hold at least one pixel of tissue. A layer at a finer stride counts all of its positions in such cells.

It is written with plain operators, so the engine executes it as it does any module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.backbones import strides_inside


class TissueCells:
    """Cells of the network's map with tissue, in the size of whatever layer asks; shared by all its layers."""

    def __init__(self) -> None:
        self._map: Tensor | None = None
        self._sizes: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    @contextmanager
    def shown(self, tissue: Tensor | None) -> Iterator[None]:
        """Know the tissue of one slide, (1, 1, h, w), while the network looks at it."""
        self._map = tissue
        try:
            yield
        finally:
            self._map = None
            self._sizes.clear()

    def at(self, factor: int, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """1 at the positions of a layer's map that count, else 0, and how many count.

        Args:
            factor: Positions of the layer along one cell.
            x: The layer's map.
            dtype: That of what is returned.
        """
        if self._map is None:
            raise ValueError(
                "model.batchnorm_over is tissue, and a training step was given no map of tissue: call the network with "
                "tissue=[...], one map for each magnification"
            )
        height, width = x.shape[2:]
        key = factor, height, width
        if key not in self._sizes:
            cells = self._map.to(dtype)
            fine = functional.interpolate(cells, scale_factor=factor, mode="nearest") if factor > 1 else cells
            if fine.shape[2] < height or fine.shape[3] < width:
                raise ValueError(
                    f"a BatchNorm's map of {height} × {width} positions is larger than its tissue of "
                    f"{tuple(fine.shape[2:])}; correct the backbone's attribute stride"
                )
            counts = fine[:, :, :height, :width]
            self._sizes[key] = counts, counts.sum()
        return self._sizes[key]


class TissueBatchNorm2d(nn.Module):
    """The BatchNorm it is made from, with the statistics of a training step taken over tissue.

    Parameters, buffers and their names, and evaluation, are those of the original.
    """

    def __init__(self, norm: nn.BatchNorm2d, cells: TissueCells, factor: int) -> None:
        """Take over a layer.

        Args:
            norm: The layer, with running statistics.
            cells: Where a slide has tissue.
            factor: Positions of the layer along one of these cells.
        """
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.eps, self.momentum = norm.eps, norm.momentum
        self.cells, self.factor = cells, factor
        # timm's BatchNorm ends with a dropout and an activation of its own.
        self.after = nn.Sequential(*(getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)))
        self.train(norm.training)
        self.running_mean: Tensor
        self.running_var: Tensor
        self.num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            out = functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
            return self.after(out)
        mean, variance, count = self._statistics(x)
        self._follow(mean.detach(), variance.detach(), count)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale  # type: ignore[redundant-expr]
        out = x * scale[:, None, None] + shift[:, None, None]
        return self.after(out.to(x.dtype))

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and biased variance of each channel over the positions that count, and how many count.

        What does not count is set to 0 behind a shift by the running mean, the mean and variance of all positions are
        taken, and those of the counting ones follow from them. The shift cancels in the result; it keeps the difference
        of two large numbers, in which digits would be lost, small.
        """
        dtype = self.running_mean.dtype
        counts, count = self.cells.at(self.factor, x, dtype)
        near = self.running_mean.clone()  # the buffer itself is written to before backward reads it
        of_tissue = (x.to(dtype) - near[:, None, None]) * counts
        variance, mean = torch.var_mean(of_tissue, dim=(0, 2, 3), correction=0)
        share = x.shape[2] * x.shape[3] / count  # of all positions to those that count
        offset = mean * share
        return near + offset, (variance + mean * mean) * share - offset * offset, count

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics as BatchNorm does.

        It is BatchNorm's own operator that does it, given two rows that have this mean and this unbiased variance: the
        engine knows that operator writes its buffers, and when.
        """
        self.num_batches_tracked += 1
        momentum = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        half = (unbiased.clamp(min=0) / 2).sqrt()
        rows = torch.stack([mean + half, mean - half])
        functional.batch_norm(rows, self.running_mean, self.running_var, None, None, True, momentum, self.eps)


def over_tissue(backbone: nn.Module, stride: int) -> TissueCells:
    """Let every BatchNorm of a backbone take its statistics over tissue; where that is, the cells returned are told.

    Args:
        backbone: The network, which is changed.
        stride: Pixels for one position of its map.
    """
    norms = {name: module for name, module in backbone.named_modules() if isinstance(module, nn.BatchNorm2d)}
    others = [
        f"{name} ({type(module).__name__})"
        for name, module in backbone.named_modules()
        if isinstance(module, nn.GroupNorm | nn.modules.instancenorm._InstanceNorm)
    ]
    name = type(backbone).__name__
    if others:
        raise ValueError(
            f"model.batchnorm_over is tissue, which BatchNorm alone knows; {name} has {others[0]}: choose norm: "
            "batch, or batchnorm_over: slide"
        )
    if not norms:
        raise ValueError(
            f"model.batchnorm_over is tissue and {name} has no BatchNorm: choose norm: batch, or leave it out"
        )
    cells = TissueCells()
    strides = strides_inside(backbone, norms)
    for path, norm in norms.items():
        if reason := _hindrance(norm, stride, strides[path]):
            raise ValueError(
                f"model.batchnorm_over is tissue, and the BatchNorm {path} of {name} {reason}; use "
                "batchnorm_over: slide"
            )
        parent, _, child = path.rpartition(".")
        setattr(backbone.get_submodule(parent), child, TissueBatchNorm2d(norm, cells, stride // strides[path]))
    return cells


def _hindrance(norm: nn.BatchNorm2d, whole: int, own: int) -> str | None:
    """The reason for which the statistics of a layer cannot be taken over tissue."""
    if norm.running_mean is None:
        return "has no running statistics, and would need tissue in evaluation too"
    if whole % own:
        return f"has stride {own}: it must divide that of the map, {whole}"
    if type(norm).forward is not nn.BatchNorm2d.forward and not hasattr(norm, "act"):
        return f"is a {type(norm).__name__}, which does more than BatchNorm2d"
    return None
