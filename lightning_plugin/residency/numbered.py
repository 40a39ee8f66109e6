"""The tiles that a boundary is made of, with numbers that are equal for those of which one stands for all.

A boundary has two such lists. In the one, tiles that forward has made by one computation have one number: boxes that
lie alike in them hold the same, to the bit. The other is its bulk.

[Note: bulk] A segment that evaluates identical tiles for each other needs, for the gradients of its vectors, no tile's
cotangent but the sum of all. So whoever reads the boundary that it stored may give the gradients of several of its own
tiles at the place of one, if that changes no such sum: the tiles are identical, and what they read lies alike in tiles
of the maker of which only the sum is asked. A boundary's *bulk* says which these are: the maker's tiles, as they are in
its backward, each with a number that several have only if they are identical, and if their own gradients, of what they
read, may be given at the place of one; and so on down to the image, which needs no gradient. On a slide of which most
is glass, the gradients of glass are pulled back for one tile, however many there are. A ring of tiles around tissue
counts each for itself, and one ring more for each segment between the map and the image.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_plugin.boxes import Box


@dataclass(frozen=True, eq=False)
class Numbered:
    """The numbers of the tiles that a map is cut into, and where these end on each axis."""

    ends: tuple[np.ndarray, ...]
    numbers: np.ndarray

    @staticmethod
    def empty(ends: Sequence[Sequence[int]]) -> Numbered:
        """Tiles without numbers."""
        return Numbered(tuple(map(np.asarray, ends)), np.zeros([len(e) - 1 for e in ends], dtype=np.int64))

    def number(self, box: Box, number: int) -> None:
        """Give the tile of a box its number."""
        self.numbers[
            tuple(int(np.searchsorted(e, lo, "right")) - 1 for e, lo in zip(self.ends, box.lo, strict=True))
        ] = number

    def signature(self, box: Box) -> Hashable:
        """Equal for boxes that lie alike in tiles of the same numbers."""
        over, edges = [], []
        for e, (lo, hi) in zip(self.ends, box.intervals(), strict=True):
            first, last = int(np.searchsorted(e, lo, "right")) - 1, int(np.searchsorted(e, hi, "left"))
            over.append(slice(first, last))
            edges.append(tuple((e[first : last + 1] - lo).tolist()))
        return tuple(edges), self.numbers[tuple(over)].tobytes()
