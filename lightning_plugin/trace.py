"""What a tile pass makes and lets go, in order, and what that needs where its tiles have other sizes.

[Note: traced] Passes over tiles that do the same on boxes of other sizes make and let go the same things in the same
order: their *trace*. How large a thing is goes with its box: it is some value's tile, or the part of one that an
operator reads, in another type perhaps, or it has a side of one; or it has nothing to do with tiles, as a gradient of
a parameter. Which of these it is, traces of tiles of different sizes show. So what a third pass needs is added up, and
nothing is run; too much by no more than the few rows that some things lack (`NEARLY`). It is only said where the traces
tell: what has another size now, and was the same in all of them, may be what something depends on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

#: Traces of passes that do the same; of more, nothing is learnt that these do not say.
MOST = 4
#: A thing goes with a measure where it is the same multiple of it, up to so much: a row may be missing of it.
NEARLY = 1.004


@dataclass(frozen=True)
class Trace:
    """What a tile pass made and let go, phase by phase: the number of a thing where it was made, ``~number`` where it
    went. ``sizes`` are the things' bytes, ``before`` the numbers of those that were there when the pass began."""

    phases: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    before: frozenset[int]

    def needs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The most that is live in each phase beyond what was when the pass began, if things have such sizes."""
        found, live = [], 0
        for phase in self.phases:
            most = max(0, live)
            for event in phase:
                if event >= 0:
                    live += sizes[event]
                    if live > most:
                        most = live
                else:
                    live -= sizes[~event]
            found.append(most)
        return tuple(found)


@dataclass(frozen=True)
class Measures:
    """What a thing's size may go with: sizes of the tiles of a pass, and of the whole maps that it reads and makes."""

    tiles: tuple[int, ...]
    maps: tuple[int, ...]


#: A size: always the same, or so many times a measure, by its place; of several that fit, the largest counts.
Term = int | tuple[tuple[int, Fraction], ...]


@dataclass(eq=False)
class Traces:
    """The traces of passes that do the same on tiles of other sizes."""

    examples: list[tuple[Measures, Trace]] = field(default_factory=list)
    #: Of things that were made, and of those that were there before; None where traces do not agree.
    terms: tuple[Term, ...] | None = None

    def learn(self, measures: Measures, trace: Trace) -> None:
        """Take one more trace."""
        if len(self.examples) < MOST and all(measures != known for known, _ in self.examples):
            same = self.examples and self.examples[0][1].phases == trace.phases
            self.examples.append((measures, replace(trace, phases=self.examples[0][1].phases) if same else trace))
            self.terms = self.found()

    def needs(self, measures: Measures) -> tuple[int, ...] | None:
        """What a pass over tiles of such sizes needs, where the traces tell."""
        if self.terms is None or not self.telling(measures):
            return None
        trace = self.examples[0][1]
        known: dict[tuple[Term, bool], int] = {}
        sizes = []
        for number, term in enumerate(self.terms):
            key = term, number in trace.before
            if key not in known:
                known[key] = size_of(term, measures.maps if key[1] else measures.tiles)
            sizes.append(known[key])
        return trace.needs(sizes)

    def telling(self, measures: Measures) -> bool:
        """Whether what is another size now was of several sizes in the traces."""
        (first, trace), *others = self.examples
        pairs = [(first.tiles, measures.tiles, [m.tiles for m, _ in others])]
        if trace.before:
            pairs.append((first.maps, measures.maps, [m.maps for m, _ in others]))
        return all(
            a == b or any(other[i] != a for other in more)
            for was, now, more in pairs
            for i, (a, b) in enumerate(zip(was, now, strict=True))
        )

    def found(self) -> tuple[Term, ...] | None:
        """How each thing's size goes with the measures, where there is an answer for all."""
        traces = [trace for _, trace in self.examples]
        first = traces[0]
        if len(traces) < 2 or any((t.phases, t.before) != (first.phases, first.before) for t in traces):
            return None
        tiles = list(zip(*(measures.tiles for measures, _ in self.examples), strict=True))
        maps = list(zip(*(measures.maps for measures, _ in self.examples), strict=True))
        known: dict[tuple[tuple[int, ...], bool], Term | None] = {}
        terms: list[Term] = []
        for number, sizes in enumerate(zip(*(t.sizes for t in traces), strict=True)):
            key = sizes, number in first.before
            if key not in known:
                known[key] = term_of(sizes, maps if key[1] else tiles)
            term = known[key]
            if term is None:
                return None
            terms.append(term)
        return tuple(terms)


def term_of(sizes: tuple[int, ...], measures: Sequence[tuple[int, ...]]) -> Term | None:
    """What sizes of one thing, one of each example, go with: measures of which they are the same multiple in all or,
    where there is none, the one of which they are most nearly so. Then the largest multiple counts, and a little more,
    since at other sizes there may be a larger."""
    if all(size == sizes[0] for size in sizes):
        return sizes[0]
    exact: list[tuple[int, Fraction]] = []
    nearest = NEARLY
    near: tuple[int, Fraction] | None = None
    for i, measure in enumerate(measures):
        if not all(measure) or measure.count(measure[0]) == len(measure):
            continue
        if all(size * measure[0] == sizes[0] * m for size, m in zip(sizes, measure, strict=True)):
            exact.append((i, Fraction(sizes[0], measure[0])))
        elif not exact:
            factors = [size / m for size, m in zip(sizes, measure, strict=True)]
            spread = max(factors) / min(factors) if min(factors) else math.inf
            if spread < nearest:
                nearest, near = spread, (i, Fraction(max(factors) * spread))
    if exact:
        return tuple(exact)
    return None if near is None else (near,)


def size_of(term: Term, measures: Sequence[int]) -> int:
    """What a term comes to where measures are these."""
    return term if isinstance(term, int) else max(-(-measures[i] * f.numerator // f.denominator) for i, f in term)
