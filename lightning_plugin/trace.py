"""What a tile pass makes and lets go, in order, and what that needs where its tiles have other sizes.

[Note: traced] Passes over tiles that do the same on boxes of other sizes make and let go the same things in the same
order: their *trace*. How large a thing is goes with a box: it is some value's tile, or the part of one that an operator
reads, in another type perhaps; or a few rows more or fewer than one, where an operator pads, or reads within what is
held; or it has a side of one; or it has nothing to do with tiles, as a gradient of a parameter. Which of these it is,
traces of tiles of different sizes show. So what a third pass needs is added up, and nothing is run; too much by no more
than the few rows that some things lack (`NEARLY`). It is only said where the traces tell: what has another size now,
and was the same in all of them, may be what something depends on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

#: Traces of passes that do the same; of more, nothing is learnt that these do not say.
MOST = 4
#: A thing goes with a measure where it is the same multiple of it, up to so much: a row may be missing of it.
NEARLY = 1.004
#: By so many positions a thing may be longer or shorter on an axis than the box that it goes with: as windows reach.
REACH = 8


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


#: The sides of a box.
Sides = tuple[int, ...]


@dataclass(frozen=True)
class Measures:
    """What a thing's size may go with: the sides of the boxes of a pass's tiles, and the bytes of the whole maps that
    it reads and makes, each as a side."""

    tiles: tuple[Sides, ...]
    maps: tuple[Sides, ...]


@dataclass(frozen=True)
class Measure:
    """The positions of the box with a number, where it is ``longer`` by so many on each axis; None for an axis that
    does not count."""

    number: int
    longer: tuple[int | None, ...]

    def of(self, sides: Sides) -> int:
        return math.prod([side + more for side, more in zip(sides, self.longer, strict=True) if more is not None])

    @property
    def far(self) -> int:
        """How unlike the box it is."""
        return sum(abs(more) for more in self.longer if more is not None)


#: A size: always the same, or so many times a measure; of several that fit, the largest counts.
Term = int | tuple[tuple[Measure, Fraction], ...]


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
        for were, trace in self.examples:
            if were.tiles == measures.tiles and (were.maps == measures.maps or not trace.before):
                return trace.needs(trace.sizes)
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
        if (len(first.tiles), len(first.maps)) != (len(measures.tiles), len(measures.maps)):
            return False
        pairs = [(first.tiles, measures.tiles, [m.tiles for m, _ in others])]
        if trace.before:
            pairs.append((first.maps, measures.maps, [m.maps for m, _ in others]))
        return all(
            a == b or any(sides[axis] != a for sides in more)
            for was, now, examples in pairs
            for here, there, *more in zip(was, now, *examples, strict=True)
            for axis, (a, b) in enumerate(zip(here, there, strict=True))
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


def term_of(sizes: tuple[int, ...], boxes: Sequence[tuple[Sides, ...]]) -> Term | None:
    """What sizes of one thing, one of each example, go with: measures of which they are the same multiple in all, as
    like to boxes as can be, or, where there is none, the one of which they are most nearly so. Then the largest
    multiple counts, and a little more, since at other sizes there may be a larger."""
    if all(size == sizes[0] for size in sizes):
        return sizes[0]
    several = {column: number for number, column in reversed(list(enumerate(boxes))) if len(set(column)) > 1}
    exact = [m for column, number in several.items() for m in whole(number, column) if goes_with(sizes, m, column)]
    exact = exact or [m for column, number in several.items() for m in reaching(sizes, number, column)]
    if exact:
        near = min(m.far for m in exact)
        return tuple((m, Fraction(sizes[0], m.of(boxes[m.number][0]))) for m in exact if m.far == near)
    nearest, found = NEARLY, None
    for column, number in several.items():
        for m in whole(number, column):
            factors = [Fraction(size, of) for size, of in zip(sizes, map(m.of, column), strict=True) if of]
            spread = max(factors) / min(factors) if len(factors) == len(sizes) and min(factors) else math.inf
            if spread < nearest:
                nearest, found = float(spread), ((m, max(factors) * Fraction(float(spread))),)
    return found


def whole(number: int, column: Sequence[Sides]) -> Iterator[Measure]:
    """A box, and its sides on some axes, where it has positions."""
    if not all(map(all, column)):
        return
    for counts in itertools.product((True, False), repeat=len(column[0])):
        if any(counts):
            yield Measure(number, tuple(0 if counted else None for counted in counts))


def goes_with(sizes: Sequence[int], m: Measure, column: Sequence[Sides]) -> bool:
    """Whether sizes are all the same multiple of a measure."""
    first, *others = map(m.of, column)
    return first > 0 and all(sizes[0] * of == size * first for size, of in zip(sizes[1:], others, strict=True))


def reaching(sizes: Sequence[int], number: int, column: Sequence[Sides]) -> Iterator[Measure]:
    """The measures longer or shorter than a box that sizes go with: of all but the last axis that counts each length is
    tried, and of that it is found."""
    reach = range(-REACH, REACH + 1)
    for m in whole(number, column):
        *tried, last = [axis for axis, more in enumerate(m.longer) if more is not None]
        for lengths in itertools.product(reach, repeat=len(tried)):
            longer = list(m.longer)
            for axis, more in zip(tried, lengths, strict=True):
                longer[axis] = more
            longer[last] = solved(sizes, column, last, Measure(number, (*longer[:last], None, *longer[last + 1 :])))
            made = Measure(number, tuple(longer))
            if longer[last] is not None and goes_with(sizes, made, column):
                yield made


def solved(sizes: Sequence[int], column: Sequence[Sides], axis: int, others: Measure) -> int | None:
    """How much longer an axis is, given all others: s₁ / s₂ = o₁ (x₁ + k) / (o₂ (x₂ + k)) for the first two examples
    that differ."""
    differ = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
    if differ is None:
        return None
    one, two = sizes[0] * others.of(column[differ]), sizes[differ] * others.of(column[0])
    if one == two:
        return 0
    more, left = divmod(two * column[0][axis] - one * column[differ][axis], one - two)
    return more if left == 0 and abs(more) <= REACH and all(sides[axis] + more > 0 for sides in column) else None


def size_of(term: Term, boxes: Sequence[Sides]) -> int:
    """What a term comes to where boxes have these sides."""
    if isinstance(term, int):
        return term
    return max(-(-m.of(boxes[m.number]) * factor.numerator // factor.denominator) for m, factor in term)
