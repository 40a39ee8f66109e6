"""Memory of one tile of a segment, predicted without running it.

A tile's life is followed node by node, as a tape would run it: results are made, read for the last time and freed. With
grad, the memory that an operator saves stays until its backward, where the gradients of its inputs are made and that of
its result is freed.

The order of allocations depends on the program, not on the sizes of a tile. So it is followed once for a program, with
the indices of sizes in place of bytes (`Allocations`); the peak of a tile is the largest running sum of its own sizes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp, Source, TileOp, accumulation_dtype
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.program.pieces import UncutAxis, uncut_axes
from lightning_plugin.program.program import Program
from lightning_plugin.rules.attention import Attention
from lightning_plugin.rules.uncut import Uncut

#: Matrices of scores that live at once where keys are read piece by piece.
SCORES_FORWARD = 2
SCORES_BACKWARD = 5

#: Kinds of sizes of a node beside those of its maps: memory of its forward for a moment, memory that it saves besides
#: maps, memory of its backward for a moment, the copy that a border tile pads by hand, scores of a piece of keys, and
#: the result in backward.
SCRATCH, EXTRA, SCRATCH_BACKWARD, PADDED, SCORED, RESULT_BACKWARD = range(6)
KINDS = 6


class TiledInterval(NamedTuple):
    """A tiled interval, and the tiers of its maps.

    Attributes:
        begin: Its first place in the order.
        end: The place behind its last.
        reads: The maps of which it reads copies: those on a lower tier, and those in half precision.
        offloads: Its outputs go to a lower tier: a tile is sent from a buffer, and its cotangent fetched into one.
        ahead: Transfers overlap with the work on other tiles; see [Note: ahead] in `residency.transfer`.
        pieces: The number of pieces in which it reads keys.
        no_background: It is planned as if no part of its maps were known to be constant.
    """

    begin: int
    end: int
    reads: frozenset[Value] = frozenset()
    offloads: bool = False
    ahead: bool = False
    pieces: int = 1
    no_background: bool = False


class Allocations:
    """Allocations and releases in order, by the place of their sizes; memory is freed when its last holder drops it."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.signs: list[int] = []
        self.owner: dict[Hashable, Hashable] = {}
        self.size: dict[Hashable, int | None] = {}
        self.holders: dict[Hashable, int] = {}

    def add(self, size: int, sign: int = 1) -> None:
        self.places.append(size)
        self.signs.append(sign)

    def allocate_briefly(self, *sizes: int) -> None:
        """Count memory that is needed for a moment and freed."""
        for sign in (1, -1):
            for size in sizes:
                self.add(size, sign)

    def make(self, key: Hashable, size: int | None) -> None:
        """Count new memory, held once; None for memory that others count."""
        self.owner[key] = key
        self.size[key] = size
        self.holders[key] = 1
        if size is not None:
            self.add(size)

    def alias(self, key: Hashable, source: Hashable) -> None:
        """Hold the memory of another value by a second name."""
        self.owner[key] = self.owner[source]
        self.hold(key)

    def hold(self, key: Hashable) -> None:
        """Hold memory once more."""
        self.holders[self.owner[key]] += 1

    def drop(self, key: Hashable) -> None:
        """Let go of memory once, and free it with the last holder."""
        owner = self.owner.get(key)
        if owner is None:
            return
        self.holders[owner] -= 1
        size = self.size[owner]
        if not self.holders[owner] and size is not None:
            self.add(size, -1)

    @cached_property
    def events(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.places, dtype=np.intp), np.array(self.signs)

    def peak(self, sizes: np.ndarray) -> int:
        """The most bytes that are live at once, given all sizes."""
        places, signs = self.events
        return int(np.cumsum(sizes[places] * signs).max(initial=0))


def tile_bytes(v: Value, box: Box) -> int:
    """Bytes of a box of a map."""
    whole = Box.whole(v.space.extent).positions
    return v.bytes * box.positions // max(1, whole)


def is_padded(node: Node, box: Box) -> bool:
    """True if a window operator pads a copy of its input by hand to compute a box of its result."""
    return isinstance(node.op, TileOp) and node.op.makes_padded_copy(box)


def may_pad(node: Node) -> bool:
    """True if a window operator pads a copy of its input for some box."""
    return isinstance(node.op, TileOp) and type(node.op).makes_padded_copy is not TileOp.makes_padded_copy


class SizedProgram:
    """A program with the places of all sizes of a tile: first the bytes of its maps, by their slots, then those of its
    nodes, kind by kind, and last those of the cotangents of its ends.

    Attributes:
        known: The allocations of a tile in forward and backward, by the maps that it has no box of.
    """

    def __init__(self, program: Program, network: Network) -> None:
        self.program = program
        self.network = network
        self.steps = program.nodes
        self.maps = list(program.map_slots)
        self.profiles = [network.profiles[n.serial] for n in self.steps]
        self.known: dict[frozenset[Value], tuple[Allocations, Allocations]] = {}
        self.stored = {t.stored for t in program.targets if t.stored is not None}
        self.wholes = np.array([max(1, Box.whole(v.space.extent).positions) for v in self.maps], dtype=float)
        self.per = np.array([v.bytes for v in self.maps]) / self.wholes
        #: The map whose share of the whole is the share of each node's work, and the sizes of the whole nodes.
        measures = [n.maps[0] if isinstance(n.op, ReduceOp) else n.outputs[0] for n in self.steps]
        self.measures = np.array([program.map_slots[v] for v in measures], dtype=np.intp)
        self.made = np.array([program.map_slots.get(n.outputs[0], -1) for n in self.steps], dtype=np.intp)
        self.scaled = np.array([(p.scratch, p.extra, p.scratch_backward) for p in self.profiles]).reshape(-1, 3).T
        self.padding = [(i, n) for i, n in enumerate(self.steps) if may_pad(n)]
        self.attending = [(i, n) for i, n in enumerate(self.steps) if isinstance(n.op, Attention)]
        self.unread = [(i, n) for i, n in enumerate(self.steps) if n.serial in program.unread and has_unread(n)]

    def place(self, kind: int, step: int) -> int:
        """The place of a node's size."""
        return len(self.maps) + kind * len(self.steps) + step

    @property
    def ends(self) -> int:
        """The place of the bytes of the cotangents of the ends."""
        return len(self.maps) + KINDS * len(self.steps)

    def sizes(
        self, need: Mapping[Value, Box], pieces: int, read: Mapping[Value, UncutAxis], ends: int = 0
    ) -> np.ndarray:
        """All sizes of a tile that holds the boxes of ``need`` and reads the maps of ``read`` in ``pieces``."""
        positions = np.array([need[v].positions if v in need else 0 for v in self.maps], dtype=float)
        share, held = positions / self.wholes, (self.per * positions).astype(np.int64)
        for node in self.steps if read else ():
            if isinstance(node.op, Uncut) and node.maps[0] in read:
                for v in {node.maps[0], node.outputs[0]}:
                    held[self.program.map_slots[v]] = -(-held[self.program.map_slots[v]] // pieces)
        padded, scored = np.zeros((2, len(self.steps)), dtype=np.int64)
        for i, node in self.padding:
            box = need.get(node.outputs[0])
            if box is not None and is_padded(node, box):
                padded[i] = held[self.program.map_slots[node.maps[0]]]
        for i, node in self.attending if read else ():
            scores = math.prod(node.op.scores.shape) * accumulation_dtype(node.outputs[0].dtype).itemsize  # type: ignore[attr-defined]
            scored[i] = int(scores * share[self.measures[i]]) // pieces
        made = held[self.made]
        for i, node in self.unread:
            box = need.get(node.outputs[0])
            if box is not None and node.op.unread(box):  # type: ignore[attr-defined]
                made[i] = 0
        scaled = (self.scaled * share[self.measures]).astype(np.int64)
        return np.concatenate([held, scaled.ravel(), padded, scored, made, [ends]])

    def allocations(self, need: Mapping[Value, Box]) -> tuple[Allocations, Allocations]:
        """The lives, in forward and backward, of a tile that holds these boxes."""
        missing = frozenset(v for v in self.maps if v not in need) if len(need) < len(self.maps) else frozenset()
        if missing not in self.known:
            self.known[missing] = self.forward(missing), self.backward(missing)
        return self.known[missing]

    def start(self, missing: frozenset[Value]) -> Allocations:
        """Allocations of the maps that a tile reads: none for a view of memory on the device, or of a buffer that is
        counted already."""
        life = Allocations()
        for v in self.program.reads:
            if v not in missing:
                life.make(v, self.program.map_slots[v] if reads_copy(v) else None)
        return life

    def source(self, step: int, life: Allocations) -> Value | None:
        """The input that shares its memory with a node's result; None if the result has memory of its own. Rows that a
        scan hands on without the input they were made from have their own."""
        node, views, source = self.steps[step], self.profiles[step].views, None
        if views is not None:
            source = node.maps[views]
        elif node.serial in self.program.in_place:
            source = node.maps[0]
        return source if source is not None and source in life.owner else None

    def places_of(self, step: int, *kinds: int) -> list[int]:
        """The places of a node's sizes of some ``kinds``, without those that are 0 in all tiles."""
        profile, node = self.profiles[step], self.steps[step]
        may_be = {
            SCRATCH: profile.scratch,
            EXTRA: profile.extra,
            SCRATCH_BACKWARD: profile.scratch_backward,
            PADDED: may_pad(node),
            SCORED: isinstance(node.op, Attention),
        }
        return [self.place(kind, step) for kind in kinds if may_be[kind]]

    def drop_dead(self, step: int, life: Allocations) -> None:
        """Drop the maps that a node is the last to touch."""
        node = self.steps[step]
        for v in dict.fromkeys((*node.maps, *(o for o in node.outputs if o.is_map))):
            if self.program.last_use.get(v, -1) <= step:
                life.drop(v)

    def forward(self, missing: frozenset[Value]) -> Allocations:
        """A tile's life in forward."""
        life = self.start(missing)
        for i, node in enumerate(self.steps):
            out = node.outputs[0]
            if isinstance(node.op, ReduceOp):  # without grad it needs less than with: this is a bound
                life.allocate_briefly(*self.places_of(i, SCRATCH, EXTRA))
            elif out not in missing:
                working = self.places_of(i, PADDED, SCRATCH, *[SCORED] * SCORES_FORWARD)
                life.allocate_briefly(*working)
                source = self.source(i, life)
                if source is not None:
                    life.alias(out, source)
                else:
                    life.make(out, self.program.map_slots[out])
                    life.allocate_briefly(*working, *self.places_of(i, EXTRA))
            self.drop_dead(i, life)
        return life

    def backward(self, missing: frozenset[Value]) -> Allocations:
        """A tile's life in forward with grad and in backward."""
        life = self.start(missing)
        saved = self.recomputed(missing, life)
        life.add(self.ends)
        gradients: dict[Value, int] = {}
        for i, keys in reversed(saved):
            node = self.steps[i]
            if any(v.requires_grad for v in node.outputs):
                self.pull_back(i, missing, gradients, life)
                for size in self.places_of(i, EXTRA, PADDED):
                    life.add(size, -1)
            for key in keys:
                life.drop(key)
        return life

    def recomputed(self, missing: frozenset[Value], life: Allocations) -> list[tuple[int, list[Hashable]]]:
        """Follow forward with grad: for each node, the memory that it saves."""
        saved: list[tuple[int, list[Hashable]]] = []
        for i, node in enumerate(self.steps):
            profile, out, reduce = self.profiles[i], node.outputs[0], isinstance(node.op, ReduceOp)
            if not reduce and out in missing:
                continue
            if not reduce:
                source = self.source(i, life)
                if source is not None:
                    life.alias(out, source)
                else:
                    life.make(out, self.place(RESULT_BACKWARD, i))
                if out in self.stored:
                    life.hold(out)
            keys: list[Hashable] = []
            if any(v.requires_grad for v in node.outputs):
                keys = [life.owner[v] for v in (node.maps[place] for place in profile.saves) if v in life.owner]
                if not reduce and profile.saves_output:
                    keys.append(life.owner[out])
                for key in keys:
                    life.hold(key)
                for size in self.places_of(i, EXTRA, PADDED):
                    life.add(size)
                life.allocate_briefly(*self.places_of(i, SCRATCH))
            else:
                life.allocate_briefly(*self.places_of(i, EXTRA, PADDED))
            saved.append((i, keys))
            self.drop_dead(i, life)
        return saved

    def pull_back(self, step: int, missing: frozenset[Value], gradients: dict[Value, int], life: Allocations) -> None:
        """Follow a node's backward: gradients of inputs are made, that of the result is freed. Gradients of stored maps
        are given, and not autograd's own: others are added to a copy of them."""
        node, slots = self.steps[step], self.program.map_slots
        summed: list[tuple[int, ...]] = [()]
        for v in dict.fromkeys(node.maps):
            if not v.requires_grad or v in missing:
                continue
            if v in gradients:
                summed.append((slots[v],))  # a second gradient is added to the first
            elif self.profiles[step].views is None:
                gradients[v] = slots[v]
                life.add(slots[v])
                if v in self.stored:
                    summed.append((slots[v],))
            else:
                gradients[v] = gradients.pop(node.outputs[0], slots[v])
        working = self.places_of(step, SCRATCH_BACKWARD, *[SCORED] * SCORES_BACKWARD)
        for sizes in summed:
            life.allocate_briefly(*sizes, *working)
        if not isinstance(node.op, ReduceOp) and node.outputs[0] in gradients:
            life.add(gradients.pop(node.outputs[0]), -1)


def reads_copy(v: Value) -> bool:
    """True for an image of which a tile is read into memory of its own."""
    return v.node is not None and isinstance(v.node.op, Source) and v.node.op.location != "here"


def has_unread(node: Node) -> bool:
    """True for an operator that may be pulled back without its result; see [Note: unread] in `rules.unread`."""
    return isinstance(node.op, TileOp) and type(node.op).unread is not TileOp.unread


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

    def peak(self, interval: TiledInterval, backward: bool) -> int:
        """The peak, with the buffers of transfers, which are there as long as the pass."""
        return self.buffers(interval, backward) + self.prefetched + (self.backward if backward else self.forward)

    def buffers(self, interval: TiledInterval, backward: bool) -> int:
        """Bytes that transfers to and from lower tiers borrow: see [Note: pool] in `residency.transfer`.

        They hold a tile's input and, in backward, its cotangent; what is sent goes through the buffers that these have
        left. Where tiles travel beside the work on others, they have not left them: the next tile's come on top, and
        the last tile's result or, in backward, the gradient of its input and the sum that it is added to. Of these six
        buffers in backward, a small request may have taken a large one, so that up to three are as large as a
        cotangent.
        """
        reads = sum(size for v, size in self.reads.items() if v in interval.reads) if interval.reads else 0
        written = self.writes if interval.offloads else 0
        if not backward:
            return 2 * reads + written if interval.ahead else max(reads, written)
        if not interval.ahead:
            return reads + written
        return max(4 * reads + 2 * written, 3 * (reads + written) if reads else 0)


class Peaks:
    """Peaks of tiles, and of whole intervals that are kept, of one network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._sized_programs: dict[Program, SizedProgram] = {}
        self._strips: dict[Program, Mapping[Value, UncutAxis]] = {}

    def strips(self, program: Program, pieces: int = 2) -> Mapping[Value, UncutAxis]:
        """The maps that a program can read in ``pieces``; none for a single piece."""
        if pieces == 1:
            return {}
        if program not in self._strips:
            self._strips[program] = uncut_axes(program)
        return self._strips[program]

    def vector_gradient_bytes(self, program: Program) -> int:
        """Bytes of the gradients of vectors that a tile makes before they are added to those of earlier tiles."""
        return sum(v.bytes for v in program.vectors if v.requires_grad)

    def tile(self, program: Program, need: Mapping[Value, Box], pieces: int = 1, ends: int = 0) -> Tile:
        """The bytes of a tile that holds the boxes of ``need`` and reads keys in ``pieces``; ``ends`` are the bytes of
        the cotangents that are live when its backward begins."""
        sized = self._sized_programs.get(program)
        if sized is None:
            sized = self._sized_programs[program] = SizedProgram(program, self.network)
        sizes = sized.sizes(need, pieces, self.strips(program, pieces), ends)
        forward, backward = sized.allocations(need)
        held = dict(zip(sized.maps, sizes.tolist(), strict=False))
        # A program without targets is kept, and reads an image once.
        announced = program.prefetched if program.targets else []
        return Tile(
            {v: held[v] for v in program.reads if v in need},
            sum(held[v] for v in sized.stored & need.keys()),
            sum(held[v] for v in announced if v.device.type == "cpu" and v in need),
            forward.peak(sizes),
            backward.peak(sizes) if self.network.trains else 0,
        )

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
        ends = sum(v.bytes for v in network.alive[end] if v.requires_grad and v in made)
        tile = self.tile(program, need, ends=ends)
        return max(tile.forward, tile.backward)
