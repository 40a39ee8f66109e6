"""Replacement of sequences of equal links in a recording by one node each; see [Note: chain] in `chain`.

Each operator gets the number of its key, which is equal for operators that compute the same, on values of equal types
and shapes, made equally many operators before. If the numbers repeat with a period, a link has that many operators. A
link begins at the place within the period where the fewest bytes go from one link to the next. An operator whose map is
read far away belongs to no link; a vector that is read far away is a result of its link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

from lightning_plugin.chain import Chain, make_body
from lightning_plugin.graph import SERIAL_STEP, Node, Value, as_vector, gather
from lightning_plugin.ops import Barrier, Captured, Source, Spread, VectorOp
from lightning_plugin.private import OPERATORS
from lightning_plugin.program.key import Unkeyed, has_unkeyed_fields, structural_key, value_key

#: Most operators of a link, and largest distance from an operator to one whose result it reads.
MAX_PERIOD = 256
#: Fewest links of a chain.
MIN_LINKS = 4
#: Number of periods that are tried: this many of the most frequent, and this many of longer ones.
CANDIDATE_PERIODS = 6
#: Most values that go from a link to the next.
MAX_ENTRIES = 8

#: Place of a value: the index of the operator that makes it, counted from the beginning of the recording or of a link,
#: and the index among the operator's results.
Producer = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Span:
    """Sequence of equal links.

    Attributes:
        begin: Index of the first operator.
        period: Number of operators of a link.
        count: Number of links.
        entries: Values that a link reads from the one before, by their place from the link's begin.
    """

    begin: int
    period: int
    count: int
    entries: tuple[Producer, ...]

    @property
    def end(self) -> int:
        return self.begin + self.period * self.count

    def links(self) -> Iterator[range]:
        """Yield the indices of each link's operators."""
        return (range(begin, begin + self.period) for begin in range(self.begin, self.end, self.period))

    def without_last(self) -> Span:
        return Span(self.begin, self.period, self.count - 1, self.entries)


@dataclass(eq=False)
class NodeSequence:
    """Operators in their order, in which repeated links are found.

    Attributes:
        nodes: The operators.
        wanted: Values that are read after the last operator.
        written: Captured tensors that the recording will write. Their readers cannot run again, and are in no link.
    """

    nodes: Sequence[Node]
    wanted: Collection[Value]
    written: Collection[Value] = ()

    @cached_property
    def producers(self) -> dict[Value, Producer]:
        """The producer of each value."""
        return {v: (i, j) for i, n in enumerate(self.nodes) for j, v in enumerate(n.outputs)}

    @cached_property
    def last_read(self) -> dict[Value, int]:
        """Index of the last node that reads a value."""
        last = {v: i for i, n in enumerate(self.nodes) for v in n.inputs}
        return last | dict.fromkeys(self.wanted, len(self.nodes) + MAX_PERIOD)

    @cached_property
    def numbers(self) -> list[int]:
        """The number of each operator's key."""
        found: dict[Hashable, int] = {}
        return [found.setdefault(self.operator_key(i, n), len(found)) for i, n in enumerate(self.nodes)]

    def operator_key(self, i: int, node: Node) -> Hashable:
        """Return a key that is equal for operators that may be at the same place of two links."""
        try:
            op = structural_key(node.op), structural_key(node.inplace)
        except Unkeyed:
            return i
        if isinstance(node.op, (VectorOp, Barrier)) and not is_library_function(node.op.call.func):
            return i  # running it twice may have other effects
        if any(v in self.written for v in node.inputs):
            return i
        reads = []
        for v in node.inputs:
            near = self.nearby_producer(v, i)
            if near is None and v.is_map:
                return i  # an image, or a map from far away
            reads.append((value_key(v), near and (i - near[0], near[1])))
        if any(v.is_map and self.last_read.get(v, i) - i > MAX_PERIOD for v in node.outputs):
            return i
        return op, tuple(reads), tuple(map(value_key, node.outputs))

    def nearby_producer(self, v: Value, reader: int) -> Producer | None:
        """Return the producer of a value that a node reads; None if it is more than `MAX_PERIOD` operators away."""
        at = self.producers.get(v)
        return at if at is not None and reader - at[0] <= MAX_PERIOD else None

    def chains(self, begin: int, end: int) -> Iterator[Span]:
        """Yield the longest chain within an interval, and those before and after it."""
        intervals = [(begin, end)]
        while intervals:
            begin, end = intervals.pop()
            found = self.longest(begin, end)
            if found is not None:
                yield found
                intervals += [(begin, found.begin), (found.end, end)]

    def longest(self, begin: int, end: int) -> Span | None:
        """Return the chain with the most operators."""
        best: Span | None = None
        for period in self.periods(begin, end):
            first, length = self.longest_repeat(begin, end, period)
            if best is None or length > best.end - best.begin:
                span = self.aligned(first, length, period)
                if span is not None and (best is None or span.end - span.begin > best.end - best.begin):
                    best = span
        return best

    def periods(self, begin: int, end: int) -> list[int]:
        """Return candidate periods: the distances between equal numbers, most frequent first.

        Longer distances count too, since all operators of a link but one may be equal. So do multiples, since layers
        may alternate.
        """
        last: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for i in range(begin, end):
            number = self.numbers[i]
            distance = i - last.get(number, -MAX_PERIOD - 1 + begin)
            if distance <= MAX_PERIOD:
                distances[distance] += 1
            last[number] = i
        likely = [period for period, _ in distances.most_common(CANDIDATE_PERIODS)]
        longer = sorted(period for period in distances if period > max(likely, default=0))[:CANDIDATE_PERIODS]
        several = [times * period for period in likely for times in (2, 3, 4) if times * period <= MAX_PERIOD]
        return list(dict.fromkeys([*likely, *longer, *several]))

    def longest_repeat(self, begin: int, end: int, period: int) -> tuple[int, int]:
        """Return begin and length of the longest interval in which the numbers repeat with a period."""
        numbers, best, since = self.numbers, (begin, 0), begin
        for i in range(begin + period, end + 1):
            if i == end or numbers[i] != numbers[i - period]:
                if i - since > best[1]:
                    best = since, i - since
                since = i - period + 1
        return best

    def aligned(self, first: int, length: int, period: int) -> Span | None:
        """Return the chain in a repeating interval.

        Its links begin where the fewest bytes go from one to the next; among equal places, where the outermost module
        ends.
        """
        if length // period < MIN_LINKS:
            return None
        cuts = [(self.link_inputs(first + offset + period, period), first + offset) for offset in range(period)]
        allowed = [(found, begin) for found, begin in cuts if found is not None]
        if not allowed:
            return None
        entries, begin = min(
            allowed, key=lambda cut: (total_bytes(cut[0].values()), self.enclosing_modules(cut[1] + period))
        )
        span = Span(begin, period, (first + length - begin) // period, tuple(entries))
        while span.count >= MIN_LINKS:
            if self.is_closed(span):
                return span if self.is_self_contained(span) else None
            span = span.without_last()
        return None

    def enclosing_modules(self, cut: int) -> int:
        """Count the modules that enclose both sides of a cut."""
        sides = (self.nodes[i].path.split(".") for i in (cut - 1, cut))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False)))

    def link_inputs(self, cut: int, period: int) -> dict[Producer, Value] | None:
        """Return the values that a link beginning at a cut reads from the one before.

        None if there are none or too many, or if it reads older ones.
        """
        found: dict[Producer, Value] = {}
        for i in range(cut, cut + period):
            for v in self.nodes[i].inputs:
                near = self.nearby_producer(v, i)
                if near is not None and near[0] < cut:
                    if near[0] < cut - period:
                        return None
                    found[near[0] - cut, near[1]] = v
        return found if 0 < len(found) <= MAX_ENTRIES else None

    def is_closed(self, span: Span) -> bool:
        """True if later nodes read only those maps of a chain that the last link hands on."""
        exits = set(self.handed_on(span, span.end))
        return all(
            not v.is_map or v in exits or self.last_read.get(v, -1) < span.end
            for n in self.nodes[max(span.begin, span.end - MAX_PERIOD - span.period) : span.end]
            for v in n.outputs
        )

    def is_self_contained(self, span: Span) -> bool:
        """True if links read only those values of the chain that are handed on, and nodes outside read no vector that
        is handed on."""
        for link in span.links():
            before = set(self.handed_on(span, link.start))
            if any(not v.is_map and self.last_read[v] >= span.end for v in before):
                return False
            for i in link:
                for v in self.nodes[i].inputs:
                    at = self.producers.get(v)
                    if at is not None and span.begin <= at[0] < link.start and v not in before:
                        return False
        return True

    def handed_on(self, span: Span, cut: int) -> list[Value]:
        """Return the values that go from a link to the next at a cut."""
        return [self.nodes[cut + offset].outputs[j] for offset, j in span.entries]


def total_bytes(values: Iterable[Value]) -> int:
    return sum(v.bytes for v in values)


def is_library_function(func: Callable[..., Any]) -> bool:
    """True for functions of PyTorch and of the engine."""
    module = getattr(func, "__module__", None) or ""
    own = isinstance(func, (*OPERATORS, BuiltinFunctionType, MethodDescriptorType))
    return own or module.split(".")[0] in ("torch", "lightning_plugin")


def replace_by_chains(nodes: Sequence[Node], wanted: Collection[Value], written: Collection[Value]) -> bool:
    """Replace sequences of equal links by chains; return True if there are any.

    A chain's node becomes the producer of the last link's results and of all vectors of links that are read elsewhere.

    Args:
        nodes: The nodes of a recording.
        wanted: Values that are read after them.
        written: Captured tensors that the recording will write.
    """
    runs = NodeSequence([n for n in nodes if not isinstance(n.op, (Captured, Source))], frozenset(wanted), written)
    spans = list(runs.chains(0, len(runs.nodes)))
    for span in spans:
        make_chain(runs, span)
    return bool(spans)


def make_chain(runs: NodeSequence, span: Span) -> Node:
    """Make the node of a chain; its serial number, and those of nodes that convert its maps, follow the last link's."""
    links = [runs.nodes[link.start : link.stop] for link in span.links()]
    entering, leaving = runs.handed_on(span, span.begin), runs.handed_on(span, span.end)
    own = link_operands(runs, span)
    read = read_elsewhere(runs, span, leaving)
    results = [[link[i].outputs[j] for i, j in read] for link in links]
    body = make_body(links[0], entering, own[0], runs.handed_on(span, span.begin + span.period), results[0])
    varying = {
        body.first + i: tuple(link[i].op for link in links)
        for i, node in enumerate(links[0])
        if has_unkeyed_fields(node.op)
    }
    numbers = iter(range(links[-1][-1].serial + 1, links[-1][-1].serial + SERIAL_STEP))
    given = [gather(v, next(numbers)) if v.is_map else v for v in entering]
    made = [as_vector(v) if v.is_map else v for v in leaving]
    where = " … ".join(dict.fromkeys((links[0][0].path, links[-1][-1].path)))
    node = Node(
        Chain(link_key(runs, span), span.count, body, varying),
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


def link_key(runs: NodeSequence, span: Span) -> tuple[object, ...]:
    """Return the key of a link's operators, which is independent of the rest of the recording."""
    begin = span.begin + span.period
    return tuple(runs.operator_key(i, runs.nodes[i]) for i in range(begin, begin + span.period))


def link_operands(runs: NodeSequence, span: Span) -> list[list[Value]]:
    """Return the values that each link reads and no link makes: each once, if repetitions are at the same places in all
    links."""
    found = []
    for link in span.links():
        nodes = runs.nodes[link.start : link.stop]
        made = {*runs.handed_on(span, link.start), *(v for n in nodes for v in n.outputs)}
        found.append([v for n in nodes for v in n.inputs if v not in made])
    places = {tuple(first_places(values)) for values in found}
    if len(places) > 1:
        return found
    (once,) = places
    return [[values[i] for i in once] for values in found]


def first_places(values: Sequence[Value]) -> Iterator[int]:
    """Yield the index of the first occurrence of each value."""
    seen: set[Value] = set()
    for i, v in enumerate(values):
        if v not in seen:
            seen.add(v)
            yield i


def read_elsewhere(runs: NodeSequence, span: Span, leaving: Collection[Value]) -> list[Producer]:
    """Return the places, within a link, of vectors that nodes outside the chain read."""
    found: dict[Producer, None] = {}
    for link in span.links():
        for i in link:
            for j, v in enumerate(runs.nodes[i].outputs):
                if not v.is_map and v not in leaving and runs.last_read.get(v, -1) >= span.end:
                    found[i - link.start, j] = None
    return sorted(found)
