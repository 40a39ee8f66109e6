"""The formula of a chapter: the least and the most that its notes can be. See [Note: chapters] in `chapter`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from lightning_plugin.planner.recipes.chapter import Chapter, Term, size_of
from lightning_plugin.planner.recipes.size import Size, Tiles

#: Tiles may hold so much more beside their maps than at another size: cells that say where a map is constant, say.
SLACK = 1e-4
#: Where each tensor of a tile is noted by itself, tiles may not be smaller than this of an example's, nor larger.
AS_LARGE = 0.995
#: So many examples with larger tiles are looked at, and so many with smaller ones.
NEXT = 4


@dataclass(frozen=True)
class Example:
    """A chapter at one size: what tiles need there, and the tiles that were run, grid by grid."""

    needs: tuple[int, ...]
    tiles: tuple[Tiles, ...]

    @property
    def weight(self) -> int:
        """The bytes of the heaviest tiles."""
        return heaviest(self.tiles)

    def above(self, tiles: Sequence[Tiles]) -> float:
        """How many times the maps of this tiles have at most."""
        return max((at_most(t, mine) for here, mine in zip(tiles, self.tiles, strict=True) for t in here), default=1.0)

    def below(self, tiles: Sequence[Tiles]) -> float:
        """How many times the maps of this tiles have at least."""
        return min((at_least(a, here) for here, mine in zip(tiles, self.tiles, strict=True) for a in mine), default=1.0)

    def most(self, tiles: Sequence[Tiles]) -> list[float]:
        """What tiles need at most, going by this."""
        factor = self.above(tiles)
        return [n * max(1.0, factor) if factor < math.inf else math.inf for n in self.needs]

    def least(self, tiles: Sequence[Tiles]) -> list[float]:
        """What tiles need at least, going by this."""
        factor = self.below(tiles)
        return [n * min(1.0, factor) for n in self.needs]

    def between(self, other: Example, tiles: Sequence[Tiles]) -> list[float]:
        """What tiles need at most, going by this and another example."""
        share = share_of(tiles, self.tiles, other.tiles)
        pairs = zip(self.needs, other.needs, strict=True)
        return [a + share * max(0, b - a) if share < math.inf else math.inf for a, b in pairs]


#: The sizes of a chapter's notes: the least and the most that each can be.
Bounds = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Formula:
    """The notes of a chapter that has some traits: their ``terms``, and examples of what tiles need, the lightest
    first."""

    chapter: Chapter
    terms: tuple[Term, ...]
    examples: tuple[Example, ...]

    @staticmethod
    def of(examples: Sequence[tuple[Size, Chapter]], terms: tuple[Term, ...]) -> Formula:
        """The formula of a chapter, given its terms and examples with its traits."""
        needing = [i for i, term in enumerate(terms) if term is None]
        found = (Example(tuple(c.notes[i].size for i in needing), c.tiles(size)) for size, c in examples)
        return Formula(examples[0][1], terms, tuple(sorted(found, key=lambda e: e.weight)))

    def bounds(self, size: Size) -> Bounds | None:
        """The sizes of the notes at a size of the images, if they are bounded."""
        needs = self.needs(self.chapter.tiles(size))
        if needs is None:
            return None
        least, most = map(iter, needs)
        known = {term: size_of(term, size.values) for term in set(self.terms) if term is not None}
        return (
            [next(least) if term is None else known[term] for term in self.terms],
            [next(most) if term is None else known[term] for term in self.terms],
        )

    def needs(self, tiles: tuple[Tiles, ...]) -> Bounds | None:
        """The least and the most that tiles need."""
        at = bisect_left(self.examples, heaviest(tiles), key=lambda e: e.weight)
        below, above = self.examples[max(0, at - NEXT) : at], self.examples[at : at + NEXT]
        near = [*below, *above]
        if not self.chapter.summed and not any(e.above(tiles) <= 1 and e.below(tiles) >= AS_LARGE for e in near):
            return None
        least = [max(n) for n in zip(*(e.least(tiles) for e in near), strict=True)]
        most = [min(n) for n in zip(*(e.most(tiles) for e in near), strict=True)]
        if most != least:
            pairs = (one.between(other, tiles) for one, other in product(below, above))
            most = [min(n) for n in zip(most, *pairs, strict=True)]
        if math.inf in most:
            return None
        return [math.floor(n) for n in least], [math.ceil((1 + SLACK) * n) for n in most]


def heaviest(tiles: Sequence[Tiles]) -> int:
    """The bytes of the heaviest tiles, grid by grid."""
    return sum(max(map(sum, of_grid), default=0) for of_grid in tiles)


def at_most(tile: Sequence[int], others: Tiles) -> float:
    """The least μ so that a tile has no map larger than μ times that of some other."""
    alike = [o for o in others if len(o) == len(tile)]
    return min((max((over(a, b) for a, b in zip(tile, o, strict=True)), default=0.0) for o in alike), default=math.inf)


def at_least(tile: Sequence[int], others: Tiles) -> float:
    """The greatest μ so that some other has no map smaller than μ times that of a tile."""
    alike = [o for o in others if len(o) == len(tile)]
    return max((min((b / a for a, b in zip(tile, o, strict=True) if a), default=1.0) for o in alike), default=0.0)


def over(size: int, other: int) -> float:
    """How many times another size this is."""
    return size / other if other else math.inf if size else 0.0


def share_of(here: Sequence[Tiles], ones: Sequence[Tiles], others: Sequence[Tiles]) -> float:
    """The least λ between 0 and 1 for which each tile here is no larger than (1 - λ) times some tile of ones and λ
    times some tile of others, grid by grid; infinite where there is none."""
    return max(
        (
            min((share_of_tile(tile, a, b) for a, b in product(first, second)), default=math.inf)
            for tiles, first, second in zip(here, ones, others, strict=True)
            for tile in tiles
        ),
        default=0.0,
    )


def share_of_tile(tile: Sequence[int], one: Sequence[int], other: Sequence[int]) -> float:
    """The same of one tile between two."""
    if not len(tile) == len(one) == len(other):
        return math.inf
    share = 0.0
    for size, a, b in zip(tile, one, other, strict=True):
        if size > a:
            if size > b:
                return math.inf
            share = max(share, (size - a) / (b - a))
    fits = all(size <= a + share * (b - a) + 1e-6 for size, a, b in zip(tile, one, other, strict=True))
    return share if fits else math.inf
