"""Views that cut an axis into blocks, or join blocks to an axis.

A view of ``H`` as ``(H // 2, 2)`` leaves an axis half as long and a plain factor of 2 inside each position; a view of
``(H, 2)`` as one dimension makes an axis twice as long. Space-to-depth, window partitions and their inverses are made
of these two, whoever writes them out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Dim, Factor, Layout
from lightning_plugin.ops import Along
from lightning_plugin.rules.table import Recorder


@dataclass(frozen=True, slots=True)
class Block:
    """One axis that becomes shorter (a block of ``size`` becomes a position) or, if ``finer``, longer."""

    size: int
    finer: bool

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        return (lo // self.size, -(-hi // self.size)) if self.finer else (lo * self.size, hi * self.size)

    def mark(self, lo: int, hi: int) -> Hashable:
        """Offset of the tile in its first block."""
        return lo % self.size if self.finer else 0


@dataclass(frozen=True)
class Blocks(Along):
    """Axes that become shorter or longer by whole numbers."""

    kind: ClassVar[str] = "layout"
    maps: tuple[Block, ...]

    def crop(self, x: Tensor, box: Box, dims: Sequence[int]) -> Tensor:
        """The outputs of ``box`` among those of all blocks that it touches."""
        for block, (lo, hi), d in zip(self.maps, self.intervals(box), dims, strict=True):
            x = x.narrow(d, lo % block.size, hi - lo)
        return x


@dataclass(frozen=True)
class Cut(Blocks):
    """A view that cuts axes: blocks of rows become a plain factor."""

    layout: Layout

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return tiles[0].reshape(self.layout.tile_shape(box))


@dataclass(frozen=True)
class Join(Blocks):
    """Dimensions that hold an axis and a plain factor inside it become axes."""

    dims: tuple[int, ...]

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return self.crop(tiles[0], box, self.dims)


def cut(layout: Layout, shape: Sequence[int]) -> Cut | None:
    """The operator of a view that `Layout.regroup` declines, where all it does besides is to cut axes."""
    blocks: dict[int, int] = {}
    extent = list(layout.extent)
    dims: list[Dim] = []
    waiting: list[Factor] = [f for dim in layout.dims for f in dim if f != 1]
    sizes = [layout.extent[f.index] if isinstance(f, Axis) else f for f in waiting]
    if 0 in sizes:
        return None
    wanted = [s for s in shape if s != 1]
    for want in wanted:
        dim: list[Factor] = []
        while want > 1 and waiting:
            f, size = waiting.pop(0), sizes.pop(0)
            if want % size and size % want:
                return None
            if want % size == 0:
                want //= size
                dim.append(f)
                continue
            rest = size // want
            if isinstance(f, Axis):
                blocks[f.index] = rest
                extent[f.index] = want
            dim.append(f if isinstance(f, Axis) else want)
            waiting.insert(0, rest)
            sizes.insert(0, rest)
            want = 1
        if want > 1:
            return None
        dims.append(tuple(dim))
    if any(size > 1 for size in sizes):
        return None
    full = iter(dims)
    placed: list[Dim] = [(1,) if s == 1 else next(full) for s in shape]
    placed[-1] = (*placed[-1], *(f for f in waiting if isinstance(f, Axis)))
    found = Layout(tuple(placed), tuple(extent))
    if found.shape != tuple(shape):
        return None
    return Cut(tuple(Block(size, False) for size in blocks.values()), tuple(blocks), found)


def joined(rec: Recorder, x: Value) -> Value:
    """The same map with every dimension that is (an axis, a plain factor) made an axis."""
    extent = list(x.space.extent)
    dims = list(x.space.dims)
    found: list[tuple[int, int, int]] = []
    for d, dim in enumerate(dims):
        match dim:
            case (Axis(index=axis), int(size)) if extent[axis] > 1 and size > 1:
                found.append((axis, size, d))
                extent[axis] *= size
                dims[d] = (Axis(axis),)
    if not found:
        return x
    axes, sizes, joined_dims = zip(*found, strict=True)
    op = Join(tuple(Block(size, True) for size in sizes), axes, joined_dims)
    layout = Layout(tuple(dims), tuple(extent))
    value: Value = rec.emit(op, [x], [x.fake], layout, "view")[0]
    return value
