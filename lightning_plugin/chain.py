"""A chain: a run of equal links, recorded as one node.

[Note: chain] A very deep network repeats itself. A long run of equal *links* (the same operators on values of the same
shapes and types, each link reading the outputs of the one before) becomes one node, with the computation of a link (its
*body*), the number of links, and the tensors that each link has for itself. So plans, rehearsals and files deal with
one link and a count. Links hand on ordinary tensors, whole. A plan says how many of these may be stored at a time (its
*slots*) and how many of the last links are *kept*, as plain PyTorch would keep them. The other links run without grad,
and again in backward (`execute.chain`). Each of them is one function of autograd, so that the gradients of its
parameters are complete when it has run backward.

[Note: schedule] Backward goes through a chain from its end. The inputs of a link are recomputed by running forward from
the nearest stored map. With room for a few maps besides the first, those are stored on the way that minimize the number
of forward runs: with room for s maps, chains of up to C(s + r, r) links are pulled back while no link runs forward more
than r times before its own backward (Griewank 1992; SCORCH calls it divide and conquer). So log T maps suffice for T
links if each link may run log T times.

The schedule keeps no state per link: it depends on the length of a chain and the number of maps only.
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
    """The computation of a link, on values of its own.

    Attributes:
        nodes: Its nodes.
        entries: The vectors that it reads from the link before.
        own: The vectors that each link has for itself, such as its parameters.
        exits: The vectors that the next link reads.
        results: The vectors that are read outside the chain.
        first: The place of its first operator among its nodes.
    """

    nodes: tuple[Node, ...]
    entries: tuple[Value, ...]
    own: tuple[Value, ...]
    exits: tuple[Value, ...]
    results: tuple[Value, ...]
    first: int

    @property
    def outputs(self) -> tuple[Value, ...]:
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
        signature: Key that is equal for chains with the same computation.
        count: The number of links.
        body: The computation of a link.
        varying: Operators that differ between links, since they hold a key of random numbers: one for each link, by
            their place in the body.
    """

    kind: ClassVar[str] = "chain"
    signature: Hashable
    count: int
    body: Body = field(compare=False, repr=False)
    varying: Mapping[int, Sequence[Op]] = field(compare=False, repr=False, default_factory=dict)

    def link(self, k: int) -> Body:
        """Return the body of a link, with its own operators if some vary."""
        if not self.varying:
            return self.body
        return replace_ops(self.body, {place: ops[k] for place, ops in self.varying.items()})

    def own(self, node: Node, k: int) -> tuple[Value, ...]:
        """Return the own vectors of a link, among the inputs of the chain's node."""
        first, width = len(self.body.entries), len(self.body.own)
        return node.inputs[first + k * width : first + (k + 1) * width]

    def results(self, node: Node, k: int) -> tuple[Value, ...]:
        """Return the results of a link, among the outputs of the chain's node."""
        first, width = len(self.body.exits), len(self.body.results)
        return node.outputs[first + k * width : first + (k + 1) * width]

    @property
    def trains(self) -> bool:
        return any(v.requires_grad for v in self.body.outputs)


def chains(nodes: Sequence[Node]) -> Iterator[tuple[int, Node, Chain]]:
    """Iterate over the chains of a recording: (place among its nodes, node, operator)."""
    for place, node in enumerate(nodes):
        if isinstance(node.op, Chain):
            yield place, node, node.op


@dataclass
class Copier:
    """Copies nodes to new values.

    Attributes:
        copies: The new value of each copied value.
        nodes: The new nodes.
    """

    copies: dict[Value, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def add_input(self, v: Value) -> Value:
        """Add a captured vector for a value from outside. For a map, it is spread over one of the same layout."""
        vector = Value(v.fake, None, v.requires_grad)
        self.nodes.append(Node(Captured(), (), (vector,), "tensor"))
        self.copies[v] = self._spread(vector, v) if v.is_map else vector
        return vector

    def _spread(self, vector: Value, like: Value) -> Value:
        found = Value(like.fake, like.layout, like.requires_grad)
        self.nodes.append(Node(Spread(like.space), (vector,), (found,), "spread"))
        return found

    def copy(self, node: Node, op: Op | None = None) -> None:
        outputs = tuple(Value(v.fake, v.layout, v.requires_grad) for v in node.outputs)
        inputs = tuple(self.copies[v] for v in node.inputs)
        self.nodes.append(Node(op or node.op, inputs, outputs, node.name, node.path, node.inplace))
        self.copies.update(zip(node.outputs, outputs, strict=True))

    def add_output(self, v: Value) -> Value:
        """Return a copied value that is read outside as a vector; gather it if it is a map."""
        found = self.copies[v]
        if not found.is_map:
            return found
        vector = gather(found)
        assert vector.node is not None
        self.nodes.append(vector.node)
        return vector


def make_body(
    nodes: Sequence[Node],
    entries: Sequence[Value],
    own: Sequence[Value],
    exits: Sequence[Value],
    results: Sequence[Value],
) -> Body:
    """Make a body of the nodes of one link, which read and make these values."""
    copier = Copier()
    entered, owned = tuple(map(copier.add_input, entries)), tuple(map(copier.add_input, own))
    first = len(copier.nodes)
    for node in nodes:
        copier.copy(node)
    exited, read = tuple(map(copier.add_output, exits)), tuple(map(copier.add_output, results))
    return Body(tuple(copier.nodes), entered, owned, exited, read, first)


def replace_ops(body: Body, ops: Mapping[int, Op]) -> Body:
    """Copy a body with other operators at some places among its nodes."""
    copier = Copier()
    for place, node in enumerate(body.nodes):
        copier.copy(node, ops.get(place))
    new = copier.copies
    return Body(
        tuple(copier.nodes),
        tuple(new[v] for v in body.entries),
        tuple(new[v] for v in body.own),
        tuple(new[v] for v in body.exits),
        tuple(new[v] for v in body.results),
        body.first,
    )


def min_forward_runs(length: int, free: int) -> int:
    """Return the smallest r with which ``length`` links can be pulled back in the room for ``free`` maps besides the
    first, if no link runs forward more than r times before its backward."""
    if length <= 1:
        return 0
    if free == 0:
        return length - 1
    r = 0
    while comb(free + 1 + r, r) < length:
        r += 1
    return r


def total_forwards(length: int, free: int) -> int:
    """Return the number of forward runs of all links together before their backward, with room for ``free`` maps
    besides the first."""
    if length <= 1:
        return 0
    free = min(free, length - 1)
    r = min_forward_runs(length, free)
    return r * length - comb(free + 1 + r, r - 1)


def forwards_after_run(length: int, free: int) -> int:
    """Return the number of forward runs in backward, after a run of the chain that has filled the free slots."""
    return total_forwards(length, free) - max(stored_links(length, free), default=0)


def first_stored(length: int, free: int) -> int:
    """Return the number of links to run before the first map is stored, for the backward of ``length`` links."""
    if free < 1 or length < 2:
        raise ValueError(f"a chain of {length} with room for {free} maps stores none: give 2 links and 1 map or more")
    r = min_forward_runs(length, free)
    most = comb(free + r, r - 1)  # links before it at most: the same room, one run less
    after = comb(free + r, r)  # links behind it at most: one map less
    return max(1, min(length - 1, most, max(length - after, comb(free + r - 1, max(0, r - 2)))))


def stored_links(length: int, free: int) -> Iterator[int]:
    """Iterate over the links before which maps are stored on the way to the last of ``length`` links."""
    at = 0
    while free > 0 and length - at > 1:
        at += first_stored(length - at, free)
        free -= 1
        yield at
