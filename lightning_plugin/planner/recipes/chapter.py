"""The notes of a rehearsal in chapters, and a formula for each.

[Note: chapters] A *chapter* is what a rehearsal notes from where one segment's turn begins to where the next one's
does. What is noted there depends on that segment alone, on where its maps lie and those that it reads: on its traits
(`size`), on the sizes of the network's values, and on how large its tiles are. So a formula is made for each chapter
and traits. One for all of a plan would hold at few sizes: of twenty segments hardly any two sizes agree in all, which
maps the host has room for, say.

Whatever is noted is either in proportion to some value of the network, as a map is that is stored, and its cotangent;
or it is the same at all sizes; or it is what tiles need. That is the most that any tile holds at any time: numbers that
are always the same, and some of its maps. So of tiles t and a, of which t has no map larger than μ times that of a,

    need(t) ≤ max(1, μ) · need(a),      and where t has none that is smaller:  need(t) ≥ min(1, μ) · need(a),

and tiles no larger than (1 - λ) times a and λ times b need no more than (1 - λ) · need(a) + λ · need(b). A formula
gives the least and the most that tiles can need, going by the examples near them. With both the notes are read. Where
the peak is hardly larger with the most than with the least, it is known; elsewhere the size is rehearsed, and is one
example more. Most segments are far from the peak, and need not be known that well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product

from lightning_plugin.planner.recipes.size import Size, Tiles, Traits
from lightning_plugin.stretch import Note

#: Where a chapter begins.
HEADS = frozenset({"enter", "goes on", "leave", "graph"})
#: Tiles may hold so much more beside their maps than at another size: cells that say where a map is constant, say.
SLACK = 1e-4
#: So many examples with larger tiles are looked at, and so many with smaller ones.
NEXT = 4


@dataclass(frozen=True)
class Chapter:
    """``turns`` are the places of the segments whose turn it is in some note, each with what it does."""

    notes: tuple[Note, ...]
    turns: tuple[tuple[int, str], ...]

    @property
    def marks(self) -> list[tuple[str, object]]:
        """What is noted, whatever its size."""
        return [(note.what, note.who) for note in self.notes]

    def traits(self, size: Size) -> tuple[Traits, ...]:
        """What is so at a size of the segments whose turn it is."""
        return tuple(size.traits[place] for place, _ in self.turns)

    def tiles(self, size: Size) -> tuple[Tiles, ...]:
        """The tiles that are run at a size, of each segment whose turn it is."""
        return tuple(size.tiles[place][what == "backward"] for place, what in self.turns)


def chapters(notes: Sequence[Note]) -> tuple[Chapter, ...]:
    """The chapters of a rehearsal."""
    begins = [0, *(i for i, note in enumerate(notes) if i and note.what in HEADS), len(notes)]
    return tuple(chapter(notes[a:b]) for a, b in pairwise(begins))


def chapter(notes: Sequence[Note]) -> Chapter:
    """A chapter of these notes."""
    return Chapter(tuple(notes), tuple(dict.fromkeys(tuple(note.who) for note in notes if isinstance(note.who, tuple))))


#: A size: always the same, or in proportion to values, by their places and factors.
Proportion = int | tuple[tuple[int, Fraction], ...]
#: The sizes of a note; None where they are what tiles need.
Term = Proportion | None


def terms_of(examples: Sequence[tuple[Size, Chapter]]) -> tuple[Term, ...] | None:
    """The terms that examples of a chapter agree in, if they do."""
    (first, named), *others = examples
    if any(named.marks != c.marks for _, c in others):
        return None
    values = list(zip(*(size.values for size, _ in examples), strict=True))
    tiled = any(named.tiles(first))
    known: dict[tuple[int, ...], Term] = {}
    terms: list[Term] = []
    for notes in zip(*(c.notes for _, c in examples), strict=True):
        sizes = tuple(note.size for note in notes)
        if tiled and notes[0].what == "passing":
            terms.append(None)
            continue
        if sizes not in known:
            known[sizes] = proportion(sizes, values)
        terms.append(known[sizes])
        if terms[-1] is None:
            return None
    return tuple(terms)


def proportion(sizes: tuple[int, ...], values: Sequence[tuple[int, ...]]) -> Proportion | None:
    """What notes of such sizes, one of each example, are in proportion to."""
    first = sizes[0]
    if all(size == first for size in sizes):
        return first
    found = [
        (i, Fraction(first, v[0]))
        for i, v in enumerate(values)
        if v[0]
        and any(b != v[0] for b in v)
        and all(first * b == size * v[0] for b, size in zip(v, sizes, strict=True))
    ]
    return tuple(found) or None


def size_of(term: Proportion, values: Sequence[int]) -> int:
    """Of several values that were in the same proportion in all examples, the one that says most."""
    return term if isinstance(term, int) else max(math.ceil(values[i] * factor) for i, factor in term)


@dataclass(frozen=True)
class Example:
    """A chapter at one size: what tiles need there, and the tiles that were run, grid by grid."""

    needs: tuple[int, ...]
    tiles: tuple[Tiles, ...]

    @property
    def weight(self) -> int:
        """The bytes of the heaviest tiles."""
        return heaviest(self.tiles)

    def most(self, tiles: Sequence[Tiles]) -> list[float]:
        """What tiles need at most, going by this."""
        factor = max((at_most(t, mine) for here, mine in zip(tiles, self.tiles, strict=True) for t in here), default=1)
        return [n * max(1.0, factor) if factor < math.inf else math.inf for n in self.needs]

    def least(self, tiles: Sequence[Tiles]) -> list[float]:
        """What tiles need at least, going by this."""
        factor = min((at_least(a, here) for here, mine in zip(tiles, self.tiles, strict=True) for a in mine), default=1)
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
        least = [max(n) for n in zip(*(e.least(tiles) for e in near), strict=True)]
        most = [min(n) for n in zip(*(e.most(tiles) for e in near), strict=True)]
        if most != least:
            pairs = (one.between(other, tiles) for one, other in product(below, above))
            most = [min(n) for n in zip(most, *pairs, strict=True)]
        return (
            None if math.inf in most else ([math.floor(n) for n in least], [math.ceil((1 + SLACK) * n) for n in most])
        )


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
