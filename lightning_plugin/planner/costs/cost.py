"""Cost model: bytes and seconds of one segment on one tile grid, predicted without running it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_plugin.graph import Node
from lightning_plugin.planner.analysis.background import ALL
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.grids import SampleTiles
from lightning_plugin.planner.costs.peak import Peaks, Tile
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.costs.scans import Scans, held
from lightning_plugin.program.program import Program
from lightning_plugin.program.recall import InBackward, is_unread
from lightning_plugin.rules.attention import Attention
from lightning_plugin.rules.uncut import Uncut


@dataclass(frozen=True)
class Cost:
    """Cost of one pass over all tiles.

    Attributes:
        bytes: The peak beyond what is stored.
        seconds: The predicted time.
        work: Operations, comparable with those of the plain pass.
        carried: Bytes that a scan holds from forward until its backward.
    """

    bytes: int
    seconds: float
    work: float
    carried: int = 0


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of some operators.

    Attributes:
        maps: Seconds of maps, or of their gradients.
        vectors: Seconds of gradients of vectors.
    """

    maps: float = 0.0
    vectors: float = 0.0

    @property
    def all(self) -> float:
        return self.maps + self.vectors


#: Overhead in calls, forward and backward: of each tile (finding an identical one, writing it, noting where it is
#: constant; reading its cotangent, giving its gradients), and of each operator of a tile that is computed.
TILE, STEP = (20, 60), (7, 15)

#: Overhead in calls of a piece of keys, forward and backward.
ATTENDED, PULLED = 16, 40


#: Reads and writes of each byte that is read back: for the gradient of its reductions, and for the sum of that and
#: the cotangent.
RECALLED = 9


class CostModel(Peaks):
    """Costs of the segments of one network."""

    def __init__(self, network: Network, rates: Rates) -> None:
        super().__init__(network)
        self.rates = rates
        self._found: dict[Hashable, tuple[PassSeconds, float]] = {}
        #: The tiles that stand for a scan's, for both directions and wherever its maps lie.
        self._scanned: dict[Hashable, list[Tile]] = {}

    def peak(self, tiles: SampleTiles, backward: bool) -> int:
        """Bytes of the largest tile. Backward also holds the gradients of vectors that are added to those of earlier
        tiles."""
        found = (self.tile_at(tiles, i) for i in range(tiles.count))
        most = max(self.tile_peak(tile, backward) for tile in found if tile is not None)
        return most + (self.vectors(tiles.program) if backward and tiles.grid.tiles > 1 else 0)

    def middle(self, tiles: SampleTiles, backward: bool) -> int:
        """Bytes of a tile in the middle, a quick lower bound of `peak`: grids whose middle tile is too large are left
        out."""
        tile = self.tile_at(tiles, tiles.count // 2)
        return self.peak(tiles, backward) if tile is None else self.tile_peak(tile, backward)

    def tile_at(self, tiles: SampleTiles, i: int) -> Tile | None:
        """One of the tiles that stand for all; None if it has no share in any target."""
        key = i, self.pieces if self.strips else 1
        if key not in tiles.known:
            need = tiles.need(i)
            tiles.known[key] = None if need is None else self.tile(tiles.program, need)
        found: Tile | None = tiles.known[key]
        return found

    def pass_cost(self, tiles: SampleTiles, backward: bool, distinct: float = ALL) -> tuple[float, float]:
        """(seconds, operations forward) of one pass over all tiles: forward, or recomputation and backward.

        Of identical tiles only the share ``distinct`` is computed; all are written, and given their gradients. Backward
        shares none where what is read needs gradients.
        """
        find = self.node_seconds
        back = PassSeconds()
        if backward and any(v.requires_grad for v in tiles.program.reads):
            distinct = ALL
        forward, work = find(tiles, False)
        if backward:
            unread, unmade = self.unread(tiles.program, tiles.grid.tiles)
            seconds, work = distinct * (forward.maps - unread), work - unmade
            back, _ = find(tiles, True)
            seconds += self.store_seconds(tiles.program, False) + self.store_seconds(tiles.program, True)
        else:
            seconds = distinct * forward.maps + self.store_seconds(tiles.program, False)
        seconds += distinct * back.all
        if distinct != ALL:  # what tiles of background still cost decides how many of them there should be
            tile, step = (sum(calls) if backward else calls[0] for calls in (TILE, STEP))
            calls = tile + distinct * len(tiles.program.steps) * step
            seconds += tiles.grid.tiles * calls * self.rates.call
        return seconds, work

    def recalled(self, tiles: SampleTiles, distinct: float = ALL) -> tuple[float, float]:
        """(seconds, operations) of a backward pass that reads stored results back; see [Note: recall] in
        `program.recall`. The reductions of a tile make a gradient as large as itself, to which the cotangent is
        added."""
        left = InBackward.of(tiles.program)
        size = sum(v.bytes for v in left.maps)
        seconds, work = self.pass_cost(SampleTiles(left.program, tiles.grid), True, distinct)
        return seconds + RECALLED * size * self.rates.byte(size / tiles.grid.tiles, self.rates.memory), work

    def node_seconds(self, tiles: SampleTiles, backward: bool) -> tuple[PassSeconds, float]:
        """(seconds, operations) of all tiles' nodes, in forward or backward, memoized: each amount of background asks
        for them."""
        key = tiles, backward, self.pieces, bool(self.strips)
        if key not in self._found:
            self._found[key] = self.work(tiles.program, tiles.shares, tiles.grid.tiles, backward)
        return self._found[key]

    def unread(self, program: Program, tiles: int) -> tuple[float, float]:
        """(seconds, operations) of results that backward does not compute, since no operator reads them; see [Note:
        unread] in `rules.unread`. What is stored is computed once, whatever the grid."""
        seconds = work = 0.0
        for node in program.steps if program.unread else ():
            if node.serial in program.unread and is_unread(node):
                seconds += self.time(node, 1.0, tiles)
                work += self.network.profiles[node.serial].work
        return seconds, work

    def scan(self, program: Program, scans: Scans, backward: bool) -> Cost:
        """Cost of a pass whose tiles hand rows on; see [Note: scan] in `program.scan`."""
        most, carried = self.scan_bytes(program, scans, backward)
        shares = {node.serial: part.share for node, part in zip(program.steps, scans.parts(program), strict=True)}
        forward, work = self.work(program, shares, scans.tiles, False)
        seconds = self.store_seconds(program, False) + forward.all
        if not backward:
            return Cost(most, seconds, work, carried=carried)
        back, _ = self.work(program, shares, scans.tiles, True)
        unread, unmade = self.unread(program, scans.tiles)
        more = self.store_seconds(program, True) + back.all - unread
        return Cost(most, seconds + more, work - unmade, carried=carried)

    def scan_bytes(self, program: Program, scans: Scans, backward: bool) -> tuple[int, int]:
        """Bytes of a scan's largest tile, and of all rows that its tiles hand on."""
        parts = scans.parts(program)
        kept = list(map(sum, zip(*(part.kept for part in parts), strict=True)))
        key = program, scans, self.pieces if self.strips else 1
        if key not in self._scanned:
            self._scanned[key] = [self.tile(program, held(program, parts, i)) for i in range(len(scans.samples))]
        peaks = [self.tile_peak(tile, backward) for tile in self._scanned[key]]
        if not backward:
            return max(peaks) + 2 * max(kept), sum(kept)
        # Results that are saved for their own backward are there again as a part of what the next operator reads.
        saving = [p for p, n in zip(parts, program.steps, strict=True) if self.network.profiles[n.serial].saves_output]
        most = max(peak + sum(part.held[i].twice for part in saving) for i, peak in enumerate(peaks))
        return most + self.vectors(program) + 2 * max(kept), sum(kept)

    def work(
        self, program: Program, shares: Mapping[int, float], tiles: int, backward: bool
    ) -> tuple[PassSeconds, float]:
        """(seconds, operations) of all tiles' nodes, in forward or backward, given the share of each that they compute
        together."""
        maps = vectors = flops = 0.0
        for node in program.steps:
            share = shares[node.serial]
            spent = self.spent(node, share, tiles, backward)
            maps, vectors = maps + spent.maps, vectors + spent.vectors
            flops += share * self.network.profiles[node.serial].work
        return PassSeconds(maps, vectors), flops

    def spent(self, node: Node, share: float, tiles: int, backward: bool) -> PassSeconds:
        """Seconds of a node in one pass over all tiles, forward or backward."""
        return self.backward_time(node, share, tiles) if backward else PassSeconds(self.time(node, share, tiles))

    def store_seconds(self, program: Program, backward: bool) -> float:
        """Seconds of writing tiles into stored maps or, in backward, of adding to the cotangents of maps that are
        read."""
        if not backward:
            stored = (t.stored.bytes for t in program.targets if t.stored is not None)
            return sum(2 * size * self.rates.byte(size, self.rates.memory) for size in stored)
        made = (v.bytes for v in program.reads if v.requires_grad)
        return sum(4 * size * self.rates.byte(size, self.rates.memory) for size in made)

    def kept_seconds(self, nodes: Sequence[Node]) -> float:
        """Seconds of nodes that are run whole, forward and backward."""
        trains = self.network.trains
        return sum(self.time(n, 1.0, 1) + (self.back(n, 1.0, 1) if trains else 0.0) for n in nodes)

    def time(self, node: Node, share: float, tiles: int, backward: bool = False) -> float:
        """Seconds of one pass over all tiles, which together compute ``share`` of the node.

        Every tile reads the node's vectors. A result needs memory and, if it is large, fresh memory.
        """
        size, _ = self.sizes[node.serial]
        inplace = node.inplace is not None and not backward
        whole, each = self.whole_and_each(node, 0 if inplace else size * share / tiles)
        seconds = tiles * each
        if self.strips and isinstance(node.op, Attention):
            seconds += tiles * self.pieces * (PULLED if backward else ATTENDED) * self.rates.call
        return seconds + share * whole

    def whole_and_each(self, node: Node, size: float) -> tuple[float, float]:
        """Seconds of computing a whole node in tiles of so many bytes, and of each tile beside that."""
        p, rates = self.network.profiles[node.serial], self.rates
        if p.views is not None:
            return 0.0, rates.call
        window = rates.pool if node.op.kind == "window" else rates.memory
        far = rates.reorder if p.flops else window
        byte = 1 / rates.pool if far == rates.pool else rates.byte(size, far)
        _, vectors = self.sizes[node.serial]
        return p.flops / rates.flops + p.traffic * byte, rates.call + vectors * rates.byte(vectors, rates.memory)

    def least(self, node: Node) -> tuple[float, float]:
        """A lower bound of a node's seconds in any tiles: of forward, and of both passes."""
        forward = sum(self.whole_and_each(node, 0))
        if not self.network.trains:
            return forward, forward
        times = 1 if is_unread(node) else 2
        times += any(v.requires_grad for v in node.maps)
        times += self.network.profiles[node.serial].flops > 0 and any(v.requires_grad for v in node.vectors)
        return forward, times * forward

    def back(self, node: Node, share: float, tiles: int) -> float:
        """Seconds of a node's backward."""
        return self.backward_time(node, share, tiles).all

    def backward_time(self, node: Node, share: float, tiles: int) -> PassSeconds:
        """Seconds of a node's backward: gradients of its maps, and those of its vectors, which are added up over
        tiles."""
        seconds = more = 0.0
        if isinstance(node.op, Uncut) and share > 1 and node.outputs[0].requires_grad:  # each tile adds to all of it
            size = node.outputs[0].bytes
            seconds += 3 * (share - 1) * size * self.rates.byte(size, self.rates.memory)
        if any(v.requires_grad for v in node.maps):
            seconds += self.time(node, share, tiles, True)
        if any(v.requires_grad for v in node.vectors):
            _, vectors = self.sizes[node.serial]
            more += self.time(node, share, tiles, True) if self.network.profiles[node.serial].flops else 0.0
            more += 3 * (tiles - 1) * vectors * self.rates.byte(vectors, self.rates.memory)
        return PassSeconds(seconds, more)

    @cached_property
    def sizes(self) -> dict[int, tuple[int, int]]:
        """For every node the bytes of its largest map, and of its vectors."""
        return {
            n.serial: (max(v.bytes for v in (*n.maps, *n.outputs)), sum(v.bytes for v in n.vectors))
            for n in self.network.order
        }
