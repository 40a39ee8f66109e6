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

and tiles no larger than (1 - λ) times a and λ times b need no more than (1 - λ) · need(a) + λ · need(b). The first tile
of a pass is compared with first ones only, since it makes what lies beside those after it. A formula
gives the least and the most that tiles can need, going by the examples near them. With both the notes are read. Where
the peak is hardly larger with the most than with the least, it is known; elsewhere the size is rehearsed, and is one
example more. Most segments are far from the peak, and need not be known that well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from lightning_plugin.planner.recipes.size import Size, Tiles, Traits
from lightning_plugin.stretch import Note

#: Where a chapter begins.
HEADS = frozenset({"enter", "goes on", "leave", "graph"})


@dataclass(frozen=True)
class Chapter:
    """``turns`` are the places of the segments whose turn it is in some note, each with what it does."""

    notes: tuple[Note, ...]
    turns: tuple[tuple[int, str], ...]

    @property
    def marks(self) -> list[tuple[str, object]]:
        """What is noted, whatever its size."""
        return [(note.what, note.who) for note in self.notes]

    @property
    def summed(self) -> bool:
        """Whether of each pass over tiles it is noted what they need, and not each tensor, as of tiles that hand rows
        on."""
        return sum(note.what == "passing" for note in self.notes) >= len(self.turns)

    def traits(self, size: Size) -> tuple[Traits, ...]:
        """What is so at a size of the segments whose turn it is."""
        return tuple(size.traits[place] for place, _ in self.turns)

    def tiles(self, size: Size) -> tuple[Tiles, ...]:
        """The tiles that are run at a size, of each segment whose turn it is: the first, which finds less there than
        those after it, since it makes the room that they add to, and the others."""
        of_grids = [size.tiles[place][what == "backward"] for place, what in self.turns]
        return tuple(part for tiles in of_grids for part in (tiles[:1], tiles[1:]))


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
