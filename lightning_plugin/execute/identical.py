"""Identical tiles: one is computed for all.

[Note: identical tiles] Most of a slide is background of one value. Two tiles are *identical* when all they read is the
same (constant, with the same values; or made by one computation), and all their boxes have the same extents, lie at the
same borders and are padded alike (a window wider than a tile is padded by another length in each tile near the border):
then they are the same computation. Forward computes one of them, writes it to all of their places and merges its share
of each reduction as often as there are tiles. Where a stored map comes out constant is noted when it is written
([Note: background] in `constants`), and so is which of its tiles one computation has made: kernels do not give all
positions of a constant tile the same last bits. So the next segment finds identical tiles in it too.

Backward is linear in the cotangents: one evaluation, pulled back with the sum of the tiles' cotangents, gives the sum
of their parameter gradients. Where what is read needs a gradient, each tile has its own, and is evaluated by itself: a
first segment over images, and segments behind a frozen trunk, share backward; others share forward only, but for
tiles whose cotangents are equal, too: those have equal gradients. Attribution of a pooled score, nine tenths of whose
image are background, takes half the time by that.

It holds for operators that do nothing but what their tiles' values say (`Op.uniform`): a dropout mask or an index of
a maximum depends on where a tile lies, so that a segment with such an operator computes each tile. Tiles whose shares
of a reduction land in different slices of it (two images', of a pool over each) are computed each, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from lightning_plugin.boxes import Box
from lightning_plugin.constants import Constants
from lightning_plugin.graph import Value
from lightning_plugin.ops import TileOp
from lightning_plugin.program.findings import Owned, Tapes
from lightning_plugin.program.program import Program

#: Key of the contents of a box that is read: equal contents are those of a constant, or made by one computation. None
#: where the box is like no other.
Content = Callable[[Value, Box], Hashable | None]


def may_be_identical(program: Program, constants: Callable[[Value], Constants | None]) -> bool:
    """True if something is known of all that is read, and no operator minds where a tile lies."""
    if not program.reads or not all(node.op.uniform for node in program.steps):
        return False
    return all(constants(v) is not None for v in program.reads)


def groups(tapes: Tapes, tiles: Iterable[Owned], content: Content) -> list[list[int]]:
    """The places of tiles that are the same computation, together; the others by themselves, all in the order of the
    grid."""
    found: dict[object, list[int]] = {}
    for place, owned in enumerate(tiles):
        key = tile_key(tapes, owned, content)
        found.setdefault(place if key is None else key, []).append(place)
    return list(found.values())


def tile_key(tapes: Tapes, owned: Owned, content: Content) -> object | None:
    """Equal for two tiles that are the same computation; None for a tile of its own."""
    program, need = tapes.program, tapes.boxes(owned)
    values = []
    for v in program.reads:
        if v in need:
            key = content(v, need[v])
            if key is None:
                return None
            values.append(key)
    lands = tuple(
        t.op.lands(box) for t, box in zip(program.targets, owned, strict=True) if t.stored is None and not box.empty
    )
    lie = [lying(box, t.map.space.extent) for t, box in zip(program.targets, owned, strict=True)]
    lie += [
        lying(need[v], v.space.extent)
        for v in (*program.reads, *(v for n in program.steps for v in n.outputs))
        if v.is_map and v in need
    ]
    return tuple(values), tuple(lie), tuple(padding(program, need)), lands


def padding(program: Program, need: Mapping[Value, Box]) -> Iterator[tuple[int, ...]]:
    """Padding of a tile by each window."""
    for node in program.steps:
        if isinstance(node.op, TileOp) and node.outputs[0] in need:
            yield tuple(node.op.pads(need[node.outputs[0]]))


def lying(box: Box, extent: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    """A box's extents, and at which borders of its map it lies."""
    return tuple((hi - lo, lo == 0, hi == size) for (lo, hi), size in zip(box.intervals(), extent, strict=True))
