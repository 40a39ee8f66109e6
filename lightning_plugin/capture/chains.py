"""Runs of equal links in a recording become one node each; see [Note: chain] in `chain`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lightning_plugin.capture.runs import Made, Runs, Span
from lightning_plugin.chain import Chain, body_of
from lightning_plugin.graph import ROOM, Node, Value
from lightning_plugin.ops import Captured, Source, Spread
from lightning_plugin.program.structure import varies
from lightning_plugin.recording import gathered, vector_of


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
    """What the operators of a link are, whatever else is recorded."""
    begin = span.begin + span.period
    return tuple(runs.look(i, runs.nodes[i]) for i in range(begin, begin + span.period))


def owned(runs: Runs, span: Span) -> list[list[Value]]:
    """What each link reads that no link has made: each vector once, if all links read the same ones again."""
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
