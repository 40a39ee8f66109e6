"""Pixel shuffle, its inverse, and channel shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.rules.blocks import Block, Blocks
from lightning_plugin.rules.channels import name_of, plain
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.window import axes_of, windowed

aten = torch.ops.aten


@dataclass(frozen=True)
class PixelShuffle(Blocks):
    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = aten.pixel_shuffle.default(tiles[0], self.maps[0].size)
        return self.crop(x, box, (x.dim() - 2, x.dim() - 1))


@dataclass(frozen=True)
class PixelUnshuffle(Blocks):
    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return aten.pixel_unshuffle.default(tiles[0], self.maps[0].size)


@ATEN.rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, kind="resample")
def pixel_shuffle(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, size = args
    axes = axes_of(x, 2)
    if axes is None or not plain(x, -3):
        return NotImplemented
    finer = func is aten.pixel_shuffle.default
    op = (PixelShuffle if finer else PixelUnshuffle)((Block(size, finer),) * 2, axes)
    return rec.emit(op, [x], outs, windowed(x, 2, outs[0].shape), name_of(func))


@ATEN.rule(aten.channel_shuffle.default, kind="local")
def channel_shuffle(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    return (
        local(rec, func, args, kwargs, outs[0], args[0].space, name="channel_shuffle")
        if plain(args[0], 1)
        else NotImplemented
    )
