"""Tiles that are alike are computed once.

[Note: identical tiles] Most of a slide is background of one value. Two tiles are *identical* when all they read is
constant, with the same values, and all their boxes have the same extents, lie at the same borders and are padded alike
(a window wider than a tile is padded by another length in each tile near the border): then they are the same
computation. Forward computes one of them, writes it to all of their places and merges its share of each
reduction as often as there are tiles. A stored map that comes out constant is known to be so where it was written,
so that the next segment finds identical tiles in it too.

Backward is linear in the cotangents: where nothing that is read needs a gradient, one backward with the sum of the
tiles' cotangents gives the sum of their parameter gradients. Where something does, tiles whose cotangents are equal
too, byte for byte, share one backward, whose input gradient is added at each of their places.

It holds for operators that do nothing but what their tiles' values say (`Op.uniform`): a dropout mask or an index of
a maximum depends on where a tile lies, so that a segment with such an operator computes each tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.ops import Source, TileOp
from lightning_plugin.private import FakeTensor
from lightning_plugin.program.findings import Tapes
from lightning_plugin.program.program import Program
from lightning_plugin.residency.constants import Constants

#: What says of a map's box that it is constant: a key that is equal for equal values, or None.
Constant = Callable[[Value, Box], bytes | None]
#: What a tile owns of every target.
Owned = Sequence[Box]


def may_be_alike(program: Program, constants: Callable[[Value], Constants | None]) -> bool:
    """Whether it is worth asking: some image knows of constant boxes, and no operator minds where a tile lies."""
    if not all(node.op.uniform for node in program.steps):
        return False
    return bool(program.reads) and all(
        constants(v) is not None or (is_source(v) and v.node.op.lies == "elsewhere")  # type: ignore[union-attr]
        for v in program.reads
    )


def is_source(v: Value) -> bool:
    return v.node is not None and isinstance(v.node.op, Source)


def groups(tapes: Tapes, tiles: Iterable[Owned], constant: Constant) -> Iterator[list[Owned]]:
    """Tiles that are the same computation, together; the others by themselves, all in the order of the grid."""
    found: dict[object, list[Owned]] = {}
    for place, owned in enumerate(tiles):
        key = likeness(tapes, owned, constant)
        found.setdefault(place if key is None else key, []).append(owned)
    yield from found.values()


def likeness(tapes: Tapes, owned: Owned, constant: Constant) -> object | None:
    """What two tiles have to have in common to be the same computation, or None for a tile of its own."""
    program, need = tapes.program, tapes.boxes(owned)
    values = []
    for v in program.reads:
        if id(v) in need:
            key = constant(v, need[id(v)])
            if key is None:
                return None
            values.append(key)
    lands = tuple(
        t.op.lands(box) for t, box in zip(program.targets, owned, strict=True) if t.stored is None and not box.empty
    )
    lie = [lying(box, t.map.space.extent) for t, box in zip(program.targets, owned, strict=True)]
    lie += [
        lying(need[id(v)], v.space.extent)
        for v in (*program.reads, *(v for n in program.steps for v in n.outputs))
        if v.is_map and id(v) in need
    ]
    return tuple(values), tuple(lie), tuple(padding(program, need)), lands


def padding(program: Program, need: Mapping[int, Box]) -> Iterator[tuple[int, ...]]:
    """What each window pads of a tile."""
    for node in program.steps:
        if isinstance(node.op, TileOp) and id(node.outputs[0]) in need:
            yield tuple(node.op.pads(need[id(node.outputs[0])]))


def lying(box: Box, extent: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    """A box's extents, and at which borders of its map it lies."""
    return tuple((hi - lo, lo == 0, hi == size) for (lo, hi), size in zip(box.intervals(), extent, strict=True))


def only_value(layout: Layout, tile: Tensor, box: Box) -> bytes | None:
    """The key of a tile that is the same at every position."""
    first = Box.of((lo, lo + 1) for lo in box.lo)
    factors = [f for dim in layout.dims for f in dim]
    one = layout.spread(tile, box)
    for d, f in enumerate(factors):
        if isinstance(f, Axis):
            one = one.narrow(d, 0, 1)
    same = (layout.spread(tile, box) == one).all()
    if isinstance(same, FakeTensor) or not bool(same):
        return None
    return key_of(one.reshape(layout.tile_shape(first)))


def key_of(values: Tensor) -> bytes:
    """Equal for equal values of one type."""
    values = values.detach().cpu().contiguous().flatten()
    return str(values.dtype).encode() + values.view(torch.uint8).numpy().tobytes()
