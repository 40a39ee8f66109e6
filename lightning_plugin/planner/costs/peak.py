"""Memory of one tile of a segment, predicted without running it.

A tile's life is followed node by node, as a tape would run it: results are made, read for the last time and freed. With
grad, the memory that an operator saves stays until its backward, where the gradients of its inputs are made and that of
its result is freed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp, Source, TileOp, accumulation_dtype
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.profile import Profile
from lightning_plugin.program.pieces import Strip
from lightning_plugin.program.program import Program
from lightning_plugin.rules.attention import Attention
from lightning_plugin.rules.uncut import Uncut

#: Matrices of scores that live at once where keys are read piece by piece.
SCORES_FORWARD = 2
SCORES_BACKWARD = 5


class LiveBytes:
    """Bytes that are live now and at the peak; memory is freed when its last holder drops it."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.size: dict[Value, int] = {}
        self.owner: dict[Value, Value] = {}
        self.holders: dict[Value, int] = {}

    def add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def passing(self, size: int) -> None:
        """Count memory that is needed for a moment."""
        self.peak = max(self.peak, self.live + size)

    def make(self, key: Value, size: int) -> None:
        """Count new memory, held once."""
        self.owner[key] = key
        self.size[key] = size
        self.holders[key] = 1
        self.add(size)

    def alias(self, key: Value, source: Value) -> None:
        """Hold the memory of another value by a second name."""
        self.owner[key] = self.owner[source]
        self.hold(key)

    def hold(self, key: Value) -> None:
        """Hold memory once more."""
        self.holders[self.owner[key]] += 1

    def drop(self, key: Value) -> None:
        """Let go of memory once, and free it with the last holder."""
        owner = self.owner.get(key)
        if owner is None:
            return
        self.holders[owner] -= 1
        if not self.holders[owner]:
            self.live -= self.size.pop(owner)


def tile_bytes(v: Value, box: Box) -> int:
    """Bytes of a box of a map."""
    whole = Box.whole(v.space.extent).positions
    return v.bytes * box.positions // max(1, whole)


def is_padded(node: Node, box: Box) -> bool:
    """True if a window operator pads a copy of its input by hand to compute a box of its result."""
    return isinstance(node.op, TileOp) and node.op.pads_by_hand(box)


def may_pad(node: Node) -> bool:
    """True if a window operator pads a copy of its input for some box."""
    return isinstance(node.op, TileOp) and type(node.op).pads_by_hand is not TileOp.pads_by_hand


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node that the search needs again and again.

    Attributes:
        reduce: It reduces maps to vectors.
        touched: The maps that it reads and makes.
        wants: The maps that it gives gradients to.
        grad: Its results require grad.
        pads: It may pad a copy of its input by hand.
        unread: It may be pulled back without its result.
    """

    node: Node
    profile: Profile
    reduce: bool
    out: Value
    maps: tuple[Value, ...]
    touched: tuple[Value, ...]
    wants: tuple[Value, ...]
    grad: bool
    pads: bool
    unread: bool

    @staticmethod
    def of(node: Node, profile: Profile) -> NodeFacts:
        touched = dict.fromkeys((*node.maps, *(o for o in node.outputs if o.is_map)))
        return NodeFacts(
            node,
            profile,
            isinstance(node.op, ReduceOp),
            node.outputs[0],
            node.maps,
            tuple(touched),
            tuple(v for v in dict.fromkeys(node.maps) if v.requires_grad),
            any(v.requires_grad for v in node.outputs),
            may_pad(node),
            isinstance(node.op, TileOp) and type(node.op).unread is not TileOp.unread,
        )

    @property
    def measure(self) -> Value:
        """The map whose share of the whole is the share of the node's work."""
        return self.maps[0] if self.reduce else self.out


class TileSizes:
    """Sizes of one tile of each map of a program, in bytes and as shares of the whole maps."""

    def __init__(self, need: Mapping[Value, Box], per: Mapping[Value, tuple[float, int]]) -> None:
        self.need = need
        self.share: dict[Value, float] = {}
        self.bytes: dict[Value, int] = {}
        for key, box in need.items():
            positions = box.positions
            each, whole = per[key]
            self.share[key] = positions / whole
            self.bytes[key] = int(each * positions)

    def part(self, facts: NodeFacts, size: int) -> int:
        """This tile's part of the bytes that a whole node needs."""
        return int(size * self.share.get(facts.measure, 0.0)) if size else 0


@dataclass(slots=True)
class Tile:
    """Bytes of one tile of a program, wherever the maps lie that it reads and writes.

    Attributes:
        reads: The bytes of the tile's part of each map that it reads.
        writes: The bytes of its part of all maps that it stores.
        prefetched: The bytes of pixels that a source reads ahead for the next tile.
        forward: Its peak in forward, beside transfers.
        backward: Its peak in backward.
    """

    reads: dict[Value, int]
    writes: int
    prefetched: int
    forward: int
    backward: int


class Peaks:
    """Peaks of tiles, and of whole intervals that are kept, of one network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        #: Inputs on a lower tier, of the segment that is costed: a tile of them is fetched into a buffer.
        self.offloaded: frozenset[Value] = frozenset()
        #: True if the segment's outputs go to a lower tier: a tile is sent from a buffer, and its cotangent fetched
        #: into one.
        self.offloads = False
        #: True if transfers overlap with the work on other tiles; see [Note: ahead] in `residency.transfer`.
        self.ahead = False
        #: Number of pieces in which the segment reads keys, and the maps that these are.
        self.pieces = 1
        self.strips: Mapping[Value, Strip] = {}

    @cached_property
    def facts(self) -> dict[int, NodeFacts]:
        return {n.serial: NodeFacts.of(n, self.network.profiles[n.serial]) for n in self.network.order}

    @cached_property
    def per(self) -> dict[Value, tuple[float, int]]:
        """For every map its bytes a position, and its positions."""
        maps = (v for n in self.network.order for v in (*n.maps, *n.outputs) if v.is_map)
        wholes = {v: max(1, Box.whole(v.space.extent).positions) for v in maps}
        return {v: (v.bytes / whole, whole) for v, whole in wholes.items()}

    def held(self, program: Program, need: Mapping[Value, Box]) -> TileSizes:
        """Sizes of a tile of each map of a program; of a map that is read piece by piece, those of a piece."""
        held = TileSizes(need, self.per)
        for node in program.steps if self.strips else ():
            if isinstance(node.op, Uncut) and node.maps[0] in self.strips:
                for key in {node.maps[0], node.outputs[0]} & held.bytes.keys():
                    held.bytes[key] = -(-held.bytes[key] // self.pieces)
        return held

    def scored(self, node: Node, held: TileSizes) -> int:
        """Bytes of the scores of a tile's queries and a piece of keys, where keys are read piece by piece."""
        if not self.strips or not isinstance(node.op, Attention) or node.outputs[0] not in held.share:
            return 0
        scores = math.prod(node.op.scores.shape) * accumulation_dtype(node.outputs[0].dtype).itemsize
        return int(scores * held.share[node.outputs[0]]) // self.pieces

    def vectors(self, program: Program) -> int:
        """Bytes of the gradients of vectors that a tile makes before they are added to those of earlier tiles."""
        return sum(v.bytes for v in program.vectors if v.requires_grad)

    def read_bytes(self, v: Value, size: int) -> int:
        """Bytes that reading a tile of so many bytes allocates: none if it is a view of memory on the device, or of a
        buffer that is counted already."""
        if v.node is not None and isinstance(v.node.op, Source):
            return 0 if v.node.op.lies == "here" else size
        return 0

    def buffers(self, tile: Tile, backward: bool) -> int:
        """Bytes that transfers to and from lower tiers borrow, which are there as long as the pass: see [Note: pool] in
        `residency.transfer`.

        They hold a tile's input and, in backward, its cotangent; what is sent goes through the buffers that these have
        left. Where tiles travel beside the work on others, they have not left them: the next tile's come on top, and
        the last tile's result or, in backward, the gradient of its input and the sum that it is added to. Of these six
        buffers in backward, a small request may have taken a large one, so that up to three are as large as a
        cotangent.
        """
        reads = sum(size for key, size in tile.reads.items() if key in self.offloaded) if self.offloaded else 0
        written = tile.writes if self.offloads else 0
        if not backward:
            return 2 * reads + written if self.ahead else max(reads, written)
        if not self.ahead:
            return reads + written
        return max(4 * reads + 2 * written, 3 * (reads + written) if reads else 0)

    def prefetched(self, program: Program, held: TileSizes) -> int:
        """Bytes of the next tile's pixels, where a source reads them ahead into the device's own memory. A program
        without targets is kept, and reads an image once."""
        images = program.announced if program.targets else []
        return sum(held.bytes[v] for v in images if v.device.type == "cpu" and v in held.need)

    def padded(self, facts: NodeFacts, held: TileSizes) -> int:
        """Bytes of the copy that a border tile pads by hand."""
        box = held.need.get(facts.out) if facts.pads else None
        return held.bytes[facts.maps[0]] if box is not None and is_padded(facts.node, box) else 0

    def made(self, program: Program, facts: NodeFacts, held: TileSizes) -> int:
        """Bytes of a result in backward: none if no operator reads it; see [Note: unread] in `rules.unread`."""
        op = facts.node.op
        if facts.unread and facts.node.serial in program.unread and op.unread(held.need[facts.out]):  # type: ignore[attr-defined]
            return 0
        return held.bytes[facts.out]

    def source(self, program: Program, facts: NodeFacts, books: LiveBytes) -> Value | None:
        """The input whose memory a node's result lies in; None if it has memory of its own, as rows of a scan have that
        were handed on without the input they were made from."""
        source = None
        if facts.profile.views is not None:
            source = facts.maps[facts.profile.views]
        elif facts.node.serial in program.overwrite:
            source = facts.maps[0]
        return source if source is not None and source in books.owner else None

    def tile(self, program: Program, need: Mapping[Value, Box]) -> Tile:
        """The bytes of a tile that holds these boxes."""
        held = self.held(program, need)
        stored = {t.stored for t in program.targets if t.stored is not None}
        return Tile(
            {v: held.bytes[v] for v in program.reads if v in need},
            sum(held.bytes[key] for key in stored & need.keys()),
            self.prefetched(program, held),
            self.forward_alone(program, need, held),
            self.backward_alone(program, need, held) if self.network.trains else 0,
        )

    def beside(self, tile: Tile, backward: bool) -> int:
        """Bytes that transfers hold as long as a tile lasts."""
        moves = self.buffers(tile, backward) if self.offloaded or self.offloads else 0
        return moves + tile.prefetched

    def tile_peak(self, tile: Tile, backward: bool) -> int:
        """The peak of a tile, with the buffers of transfers."""
        return self.beside(tile, backward) + (tile.backward if backward else tile.forward)

    def forward_alone(self, program: Program, need: Mapping[Value, Box], held: TileSizes) -> int:
        """The peak of a tile's forward, without transfers."""
        books = LiveBytes()
        for v in program.reads:
            if v in need:
                books.make(v, self.read_bytes(v, held.bytes[v]))
        for place, node in enumerate(program.steps):
            facts = self.facts[node.serial]
            if facts.reduce:  # without grad it needs less than with: this is a bound
                books.passing(held.part(facts, facts.profile.scratch + facts.profile.extra))
            elif facts.out in need:
                working = self.padded(facts, held) + held.part(facts, facts.profile.scratch)
                working += SCORES_FORWARD * self.scored(node, held)
                books.passing(working)
                source = self.source(program, facts, books)
                if source is not None:
                    books.alias(facts.out, source)
                else:
                    books.make(facts.out, held.bytes[facts.out])
                    books.passing(working + held.part(facts, facts.profile.extra))
            for key in facts.touched:
                if program.last_use.get(key, -1) <= place:
                    books.drop(key)
        return books.peak

    def backward_alone(self, program: Program, need: Mapping[Value, Box], held: TileSizes, ends: int = 0) -> int:
        """The peak of a tile's forward with grad and its backward, node by node, without transfers; ``ends`` are the
        bytes of the cotangents."""
        books = LiveBytes()
        for v in program.reads:
            if v in need:
                books.make(v, self.read_bytes(v, held.bytes[v]))
        saved = self.recomputed(program, held, books)
        stored = [t.stored for t in program.targets if t.stored is not None and t.stored in need]
        books.add(ends)
        self.backward_peak(saved, held, books, frozenset(stored))
        return books.peak

    def recomputed(
        self, program: Program, held: TileSizes, books: LiveBytes
    ) -> list[tuple[NodeFacts, list[Value], int]]:
        """Follow forward with grad. For each node: the memory that it saves, and the bytes that it saves besides."""
        stored = {t.stored for t in program.targets if t.stored is not None}
        saved: list[tuple[NodeFacts, list[Value], int]] = []
        for place, node in enumerate(program.steps):
            facts = self.facts[node.serial]
            profile = facts.profile
            if not facts.reduce and facts.out not in held.need:
                continue
            if not facts.reduce:
                source = self.source(program, facts, books)
                if source is not None:
                    books.alias(facts.out, source)
                else:
                    books.make(facts.out, self.made(program, facts, held))
                if facts.out in stored:
                    books.hold(facts.out)
            keys: list[Value] = []
            extra = held.part(facts, profile.extra) + self.padded(facts, held)
            if facts.grad:
                keys = [books.owner[facts.maps[i]] for i in profile.saves if facts.maps[i] in books.owner]
                if not facts.reduce and profile.saves_output:
                    keys.append(books.owner[facts.out])
                for key in keys:
                    books.hold(key)
                books.add(extra)
                books.passing(held.part(facts, profile.scratch))
            else:
                books.passing(extra)
            saved.append((facts, keys, extra if facts.grad else 0))
            for key in facts.touched:
                if program.last_use.get(key, -1) <= place and key in books.owner:
                    books.drop(key)
        return saved

    def backward_peak(
        self,
        saved: list[tuple[NodeFacts, list[Value], int]],
        held: TileSizes,
        books: LiveBytes,
        given: frozenset[Value] = frozenset(),
    ) -> None:
        """Follow backward: gradients of inputs are made, that of the result and the saved memory are freed.

        The gradients of some maps are ``given``, and not autograd's own: others are added to a copy of them.
        """
        grads: dict[Value, int] = {}
        for facts, keys, extra in reversed(saved):
            if facts.grad:
                made = 0
                for key in facts.wants:
                    if key not in held.need:
                        continue
                    size = held.bytes[key]
                    if key in grads:
                        made = max(made, size)  # a second gradient is added to the first
                    elif facts.profile.views is None:
                        grads[key] = size
                        books.add(size)
                        if key in given:
                            made = max(made, size)
                    else:
                        grads[key] = grads.pop(facts.out, size)
                scored = SCORES_BACKWARD * self.scored(facts.node, held)
                books.passing(made + held.part(facts, facts.profile.scratch_backward) + scored)
                if not facts.reduce:
                    books.add(-grads.pop(facts.out, 0))
            for key in keys:
                books.drop(key)
            books.add(-extra)

    def kept_peak(self, begin: int, end: int) -> int:
        """The peak of a kept interval while it runs, forward or backward, gradients of its ends included."""
        network = self.network
        nodes = [n for n in network.order[begin:end] if not (isinstance(n.op, ReduceOp) and n.serial in network.fused)]
        made = {v for n in nodes for v in n.outputs}
        reads = dict.fromkeys(v for n in nodes for v in n.maps if v not in made)
        last = {v: place for place, n in enumerate(nodes) for v in n.maps}
        last.update({v: len(nodes) for v in network.alive[end]})
        overwrite = frozenset(
            n.serial for n in nodes if n.inplace is not None and network.root(n.outputs[0]) is not n.outputs[0]
        )
        program = Program((), tuple(nodes), tuple(reads), (), last, overwrite)
        need = {v: Box.whole(v.space.extent) for n in nodes for v in (*n.maps, *n.outputs) if v.is_map}
        held = self.held(program, need)
        forward = self.forward_alone(program, need, held)
        if not network.trains:
            return forward
        ends = sum(v.bytes for v in network.alive[end] if v.requires_grad and v in made)
        return max(self.backward_alone(program, need, held, ends), forward)
