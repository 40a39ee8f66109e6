"""Runs of equal links in a recording become one node each; see [Note: chain] in `chain`.

Each operator gets a number that only those have which compute the same, on values of the same kinds, from values that
were made as many operators before. Where the numbers repeat with a period, links are that long; where a link begins
within a period is where least goes from one to the next. A map that is read far from where it is made belongs to no
link; a vector that is, is one of the link's results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

from lightning_plugin.chain import Chain, body_of
from lightning_plugin.graph import ROOM, Node, Value, gathered, vector_of
from lightning_plugin.ops import Barrier, Captured, Source, Spread, VectorOp
from lightning_plugin.private import OPERATORS
from lightning_plugin.program.key import Unkeyed, key, value_key, varies

#: Operators that a link may have, and from how far it may read what the one before has made.
LONGEST = 256
#: A chain has so many links.
LEAST_LINKS = 4
#: Periods that are looked at: so many of the most frequent, and so many of those that are longer.
PERIODS = 6
#: No more values may go from a link to the next.
MOST_ENTRIES = 8

#: A result that a link reads, from where the link begins: the operator that made it, and which of its results it is.
Made = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Span:
    """``count`` links of ``period`` operators, from one on; ``entries`` are what each reads of the one before."""

    begin: int
    period: int
    count: int
    entries: tuple[Made, ...]

    @property
    def end(self) -> int:
        return self.begin + self.period * self.count

    def links(self) -> Iterator[range]:
        """The places of each link's operators."""
        return (range(begin, begin + self.period) for begin in range(self.begin, self.end, self.period))

    def shorter(self) -> Span:
        return Span(self.begin, self.period, self.count - 1, self.entries)


@dataclass(eq=False)
class Runs:
    """Operators in their order, and where their numbers repeat; ``wanted`` is read after the last. Who reads a tensor
    that the recording is going to write (``written``) cannot run again, and is part of no link."""

    nodes: Sequence[Node]
    wanted: Collection[Value]
    written: Collection[Value] = ()
    looks: dict[Hashable, int] = field(default_factory=dict)

    @cached_property
    def made(self) -> dict[Value, Made]:
        """Place of the node that makes a value."""
        return {v: (i, j) for i, n in enumerate(self.nodes) for j, v in enumerate(n.outputs)}

    @cached_property
    def last_read(self) -> dict[Value, int]:
        """Place of the last node that reads a value."""
        last = {v: i for i, n in enumerate(self.nodes) for v in n.inputs}
        return last | dict.fromkeys(self.wanted, len(self.nodes) + LONGEST)

    @cached_property
    def numbers(self) -> list[int]:
        return [self.looks.setdefault(self.look(i, n), len(self.looks)) for i, n in enumerate(self.nodes)]

    def look(self, i: int, node: Node) -> Hashable:
        """Key that is equal for operators that may stand at the same place of two links."""
        try:
            op = key(node.op), key(node.inplace)
        except Unkeyed:
            return i
        if isinstance(node.op, (VectorOp, Barrier)) and not of_torch(node.op.call.func):
            return i  # nobody knows what running it again does
        if any(v in self.written for v in node.inputs):
            return i
        reads = []
        for v in node.inputs:
            near = self.near(v, i)
            if near is None and v.is_map:
                return i  # an image, or a map from far away
            reads.append((value_key(v), near and (i - near[0], near[1])))
        if any(v.is_map and self.last_read.get(v, i) - i > LONGEST for v in node.outputs):
            return i
        return op, tuple(reads), tuple(map(value_key, node.outputs))

    def near(self, v: Value, reader: int) -> Made | None:
        """Place of the node that makes a value that is read, if that is near."""
        at = self.made.get(v)
        return at if at is not None and reader - at[0] <= LONGEST else None

    def chains(self, begin: int, end: int) -> Iterator[Span]:
        """The longest chain within an interval, and those before and behind it."""
        intervals = [(begin, end)]
        while intervals:
            begin, end = intervals.pop()
            found = self.longest(begin, end)
            if found is not None:
                yield found
                intervals += [(begin, found.begin), (found.end, end)]

    def longest(self, begin: int, end: int) -> Span | None:
        """The chain that most operators are part of."""
        best: Span | None = None
        for period in self.periods(begin, end):
            first, length = self.repeating(begin, end, period)
            if best is None or length > best.end - best.begin:
                span = self.aligned(first, length, period)
                if span is not None and (best is None or span.end - span.begin > best.end - best.begin):
                    best = span
        return best

    def periods(self, begin: int, end: int) -> list[int]:
        """The distances after which an operator's number comes again, the most frequent first. All operators of a link
        may be alike but one: then that one alone says how long it is. And what takes turns, as two streams do, may need
        several."""
        seen: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for i in range(begin, end):
            number = self.numbers[i]
            distance = i - seen.get(number, -LONGEST - 1 + begin)
            if distance <= LONGEST:
                distances[distance] += 1
            seen[number] = i
        likely = [period for period, _ in distances.most_common(PERIODS)]
        longer = sorted(period for period in distances if period > max(likely, default=0))[:PERIODS]
        several = [times * period for period in likely for times in (2, 3, 4) if times * period <= LONGEST]
        return list(dict.fromkeys([*likely, *longer, *several]))

    def repeating(self, begin: int, end: int, period: int) -> tuple[int, int]:
        """The longest run of numbers that repeat with a period: where it begins, and how many there are."""
        numbers, best, since = self.numbers, (begin, 0), begin
        for i in range(begin + period, end + 1):
            if i == end or numbers[i] != numbers[i - period]:
                if i - since > best[1]:
                    best = since, i - since
                since = i - period + 1
        return best

    def aligned(self, first: int, length: int, period: int) -> Span | None:
        """The chain in a run, of links that begin where least goes from one to the next; of such places, where the
        outermost module ends."""
        if length // period < LEAST_LINKS:
            return None
        cuts = [(self.crossing(first + offset + period, period), first + offset) for offset in range(period)]
        allowed = [(found, begin) for found, begin in cuts if found is not None]
        if not allowed:
            return None
        entries, begin = min(allowed, key=lambda cut: (size(cut[0].values()), self.inside(cut[1] + period)))
        span = Span(begin, period, (first + length - begin) // period, tuple(entries))
        while span.count >= LEAST_LINKS:
            if self.closed(span):
                return span if self.sound(span) else None
            span = span.shorter()
        return None

    def inside(self, cut: int) -> int:
        """Number of modules that lie around both sides of a cut."""
        sides = (self.nodes[i].path.split(".") for i in (cut - 1, cut))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False)))

    def crossing(self, cut: int, period: int) -> dict[Made, Value] | None:
        """Values that a link beginning at a cut reads of the one before.

        None where there are none or too many, or where older ones are read.
        """
        found: dict[Made, Value] = {}
        for i in range(cut, cut + period):
            for v in self.nodes[i].inputs:
                near = self.near(v, i)
                if near is not None and near[0] < cut:
                    if near[0] < cut - period:
                        return None
                    found[near[0] - cut, near[1]] = v
        return found if 0 < len(found) <= MOST_ENTRIES else None

    def closed(self, span: Span) -> bool:
        """True where nodes beyond a chain read no maps of it but those that the last link hands on."""
        exits = set(self.handed_on(span, span.end))
        return all(
            not v.is_map or v in exits or self.last_read.get(v, -1) < span.end
            for n in self.nodes[max(span.begin, span.end - LONGEST - span.period) : span.end]
            for v in n.outputs
        )

    def sound(self, span: Span) -> bool:
        """True where links read no values of the chain but those handed on, and no vector handed on is read elsewhere
        too."""
        for link in span.links():
            before = set(self.handed_on(span, link.start))
            if any(not v.is_map and self.last_read[v] >= span.end for v in before):
                return False
            for i in link:
                for v in self.nodes[i].inputs:
                    at = self.made.get(v)
                    if at is not None and span.begin <= at[0] < link.start and v not in before:
                        return False
        return True

    def handed_on(self, span: Span, cut: int) -> list[Value]:
        """Values that go on where a link ends, and the next one begins."""
        return [self.nodes[cut + offset].outputs[j] for offset, j in span.entries]


def size(values: Iterable[Value]) -> int:
    return sum(v.bytes for v in values)


def of_torch(func: Callable[..., Any]) -> bool:
    """True of functions of PyTorch and of the engine."""
    module = getattr(func, "__module__", None) or ""
    own = isinstance(func, (*OPERATORS, BuiltinFunctionType, MethodDescriptorType))
    return own or module.split(".")[0] in ("torch", "lightning_plugin")


def with_chains(nodes: Sequence[Node], wanted: Collection[Value], written: Collection[Value]) -> bool:
    """Make chains of the runs of equal links among some nodes, of which ``wanted`` is read; whether there are any. The
    tensors that the nodes are going to write are ``written``.

    From then on, it is the chain's node that makes what its last link hands on and what is read of its links.
    """
    runs = Runs([n for n in nodes if not isinstance(n.op, (Captured, Source))], frozenset(wanted), written)
    spans = list(runs.chains(0, len(runs.nodes)))
    for span in spans:
        chained(runs, span)
    return bool(spans)


def chained(runs: Runs, span: Span) -> Node:
    """The node of a chain. Its number, and those of the nodes around it, come right behind the last link's."""
    links = [runs.nodes[link.start : link.stop] for link in span.links()]
    entering, leaving = runs.handed_on(span, span.begin), runs.handed_on(span, span.end)
    own = owned(runs, span)
    read = read_elsewhere(runs, span, leaving)
    results = [[link[i].outputs[j] for i, j in read] for link in links]
    body = body_of(links[0], entering, own[0], runs.handed_on(span, span.begin + span.period), results[0])
    varying = {
        body.first + i: tuple(link[i].op for link in links) for i, node in enumerate(links[0]) if varies(node.op)
    }
    numbers = iter(range(links[-1][-1].serial + 1, links[-1][-1].serial + ROOM))
    given = [gathered(v, next(numbers)) if v.is_map else v for v in entering]
    made = [vector_of(v) if v.is_map else v for v in leaving]
    where = " … ".join(dict.fromkeys((links[0][0].path, links[-1][-1].path)))
    node = Node(
        Chain(look(runs, span), span.count, body, varying),
        (*given, *(v for values in own for v in values)),
        (*made, *(v for values in results for v in values)),
        f"chain of {span.count}",
        where,
        serial=next(numbers),
    )
    for v, vector in zip(leaving, made, strict=True):
        if v.is_map:
            Node(Spread(v.space), (vector,), (v,), "spread", body.path, serial=next(numbers))
    return node


def look(runs: Runs, span: Span) -> tuple[object, ...]:
    """Key of a link's operators, whatever else is recorded."""
    begin = span.begin + span.period
    return tuple(runs.look(i, runs.nodes[i]) for i in range(begin, begin + span.period))


def owned(runs: Runs, span: Span) -> list[list[Value]]:
    """Values that each link reads and no link has made: each vector once, if all links read the same ones again."""
    found = []
    for link in span.links():
        nodes = runs.nodes[link.start : link.stop]
        made = {*runs.handed_on(span, link.start), *(v for n in nodes for v in n.outputs)}
        found.append([v for n in nodes for v in n.inputs if v not in made])
    places = {tuple(firsts(values)) for values in found}
    if len(places) > 1:
        return found
    (once,) = places
    return [[values[i] for i in once] for values in found]


def firsts(values: Sequence[Value]) -> Iterator[int]:
    """The places of values that did not come before."""
    seen: set[Value] = set()
    for i, v in enumerate(values):
        if v not in seen:
            seen.add(v)
            yield i


def read_elsewhere(runs: Runs, span: Span, leaving: Collection[Value]) -> list[Made]:
    """The vectors of which others read some link's, by their place in a link."""
    found: dict[Made, None] = {}
    for link in span.links():
        for i in link:
            for j, v in enumerate(runs.nodes[i].outputs):
                if not v.is_map and v not in leaving and runs.last_read.get(v, -1) >= span.end:
                    found[i - link.start, j] = None
    return sorted(found)
