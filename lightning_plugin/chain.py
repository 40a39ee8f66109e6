"""A chain: links that compute the same one after the other, recorded as one node.

[Note: chain] A network that is very deep repeats itself. Where a recording has a long run of equal *links* (the same
operators on values of the same kinds, each link reading what the one before has made), its nodes become one node that
says what a link computes, its *body*, how many there are, and which tensors of its own each has. So what is planned,
rehearsed and written down is a link and a count. What goes from link to link are ordinary tensors, whole. A plan says
how many of them may be stored at a time (its *slots*) and how many of the last links are *kept*, as plain PyTorch would
keep them; the others run without grad, and again when backward comes to them (`execute.chain`). Each of these is a
function of autograd's own, so that the gradients of its parameters are there as soon as it is pulled back.

[Note: schedule] A chain of equal links is pulled back from its end. What a link reads is made again by running forward
from the nearest map that is stored before it. With room for a few maps besides the first, the ones to store on the way
are those that make the links run as seldom as possible: with room for s maps, chains of up to C(s + r, r) links are
pulled back while no link runs forward more than r times for the sake of others (Griewank 1992; SCORCH calls it divide
and conquer). So log T maps are enough where each link may run log T times.

No state is kept for each link: a chain of any length is two numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import ClassVar

from lightning_plugin.graph import Node, Value, gather
from lightning_plugin.ops import Captured, Op, Spread


@dataclass(frozen=True, eq=False)
class Body:
    """The computation of a link, with values of its own.

    Attributes:
        nodes: Its nodes.
        entries: The vectors that come from the link before.
        own: The vectors that only this link has.
        exits: The values that go on to the next link.
        results: The values that are read elsewhere.
        first: The place of its first operator among its nodes.
    """

    nodes: tuple[Node, ...]
    entries: tuple[Value, ...]
    own: tuple[Value, ...]
    exits: tuple[Value, ...]
    results: tuple[Value, ...]
    first: int

    @property
    def made(self) -> tuple[Value, ...]:
        return (*self.exits, *self.results)

    @property
    def entry_bytes(self) -> int:
        """The bytes of one slot."""
        return sum(v.bytes for v in self.entries)

    @property
    def path(self) -> str:
        return next((n.path for n in self.nodes if n.path), "")


@dataclass(frozen=True)
class Chain(Op):
    """A number of equal links.

    The inputs of its node are the first link's entries and the own vectors of each link; its outputs are the last
    link's exits and the results of each.

    Attributes:
        look: Equal for chains that compute the same.
        count: The number of links.
        body: The computation of a link.
        varying: Operators that differ between links, since they hold a key of random numbers, by their place in the
            body.
    """

    kind: ClassVar[str] = "chain"
    look: Hashable
    count: int
    body: Body = field(compare=False, repr=False)
    varying: Mapping[int, Sequence[Op]] = field(compare=False, repr=False, default_factory=dict)

    def link(self, k: int) -> Body:
        """The body of a link: one for all where no operator varies."""
        if not self.varying:
            return self.body
        return with_ops(self.body, {place: ops[k] for place, ops in self.varying.items()})

    def own(self, node: Node, k: int) -> tuple[Value, ...]:
        """The own vectors of a link, among the inputs of the chain's node."""
        first, width = len(self.body.entries), len(self.body.own)
        return node.inputs[first + k * width : first + (k + 1) * width]

    def results(self, node: Node, k: int) -> tuple[Value, ...]:
        """The results of a link, among the outputs of the chain's node."""
        first, width = len(self.body.exits), len(self.body.results)
        return node.outputs[first + k * width : first + (k + 1) * width]

    @property
    def trains(self) -> bool:
        return any(v.requires_grad for v in self.body.made)


def chains(nodes: Sequence[Node]) -> Iterator[tuple[int, Node, Chain]]:
    """The chains of a recording, with their places among its nodes."""
    for place, node in enumerate(nodes):
        if isinstance(node.op, Chain):
            yield place, node, node.op


@dataclass
class Copier:
    """Copies nodes, with values of their own."""

    made: dict[Value, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def enter(self, v: Value) -> Value:
        """The stand-in for a value from elsewhere: a vector, and of a map the map that it is spread over."""
        vector = Value(v.fake, None, v.requires_grad)
        self.nodes.append(Node(Captured(), (), (vector,), "tensor"))
        self.made[v] = self.spread(vector, v) if v.is_map else vector
        return vector

    def spread(self, vector: Value, like: Value) -> Value:
        found = Value(like.fake, like.layout, like.requires_grad)
        self.nodes.append(Node(Spread(like.space), (vector,), (found,), "spread"))
        return found

    def copy(self, node: Node, op: Op | None = None) -> None:
        outputs = tuple(Value(v.fake, v.layout, v.requires_grad) for v in node.outputs)
        inputs = tuple(self.made[v] for v in node.inputs)
        self.nodes.append(Node(op or node.op, inputs, outputs, node.name, node.path, node.inplace))
        self.made.update(zip(node.outputs, outputs, strict=True))

    def leave(self, v: Value) -> Value:
        """A value that others read, as a vector."""
        found = self.made[v]
        if not found.is_map:
            return found
        vector = gather(found)
        assert vector.node is not None
        self.nodes.append(vector.node)
        return vector


def body_of(
    nodes: Sequence[Node],
    entries: Sequence[Value],
    own: Sequence[Value],
    exits: Sequence[Value],
    results: Sequence[Value],
) -> Body:
    """The body of the link that some nodes are, which read and make these values."""
    copier = Copier()
    entered, owned = tuple(map(copier.enter, entries)), tuple(map(copier.enter, own))
    first = len(copier.nodes)
    for node in nodes:
        copier.copy(node)
    left, found = tuple(map(copier.leave, exits)), tuple(map(copier.leave, results))
    return Body(tuple(copier.nodes), entered, owned, left, found, first)


def with_ops(body: Body, ops: Mapping[int, Op]) -> Body:
    """A body with other operators at some places among its nodes."""
    copier = Copier()
    for place, node in enumerate(body.nodes):
        copier.copy(node, ops.get(place))
    new = copier.made
    return Body(
        tuple(copier.nodes),
        tuple(new[v] for v in body.entries),
        tuple(new[v] for v in body.own),
        tuple(new[v] for v in body.exits),
        tuple(new[v] for v in body.results),
        body.first,
    )


def runs(length: int, free: int) -> int:
    """The least number r such that a chain of so many links can be pulled back with room for ``free`` maps besides its
    first, and no link runs forward more than r times before it is pulled back."""
    if length <= 1:
        return 0
    if free == 0:
        return length - 1
    r = 0
    while comb(free + 1 + r, r) < length:
        r += 1
    return r


def forwards(length: int, free: int) -> int:
    """The number of times that links run forward, all together, before they are pulled back: each once for all that
    come after it in the worst case, with room for so many maps besides the first."""
    if length <= 1:
        return 0
    free = min(free, length - 1)
    r = runs(length, free)
    return r * length - comb(free + 1 + r, r - 1)


def again(length: int, free: int) -> int:
    """The same where a run of the whole chain has been before, and has stored what there was room for on its way."""
    return forwards(length, free) - max(stored(length, free), default=0)


def split(length: int, free: int) -> int:
    """The number of links to run before a map is stored, of so many that are to be pulled back."""
    if free < 1 or length < 2:
        raise ValueError(f"a chain of {length} with room for {free} maps stores none: give 2 links and 1 map or more")
    r = runs(length, free)
    most = comb(free + r, r - 1)  # what may lie before it, with as much room and one run less
    after = comb(free + r, r)  # what may lie behind it, with one map less
    return max(1, min(length - 1, most, max(length - after, comb(free + r - 1, max(0, r - 2)))))


def stored(length: int, free: int) -> Iterator[int]:
    """After how many links maps are stored, on the way to the last of so many that are to be pulled back."""
    at = 0
    while free > 0 and length - at > 1:
        at += split(length - at, free)
        free -= 1
        yield at
