"""Cost model: bytes and seconds of one segment on one tile grid, predicted without running it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_plugin.graph import Node
from lightning_plugin.planner.analysis.background import ALL
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.grids import SampleTiles
from lightning_plugin.planner.costs.peak import Peaks, Tile, TiledInterval
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.costs.scans import Scans, held
from lightning_plugin.program.program import BackwardProgram, Program, needs_no_result
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


#: Overhead in calls, forward and backward: of each tile (finding an identical one, writing it, noting where it is
#: constant; reading its cotangent, giving its gradients), and of each operator of a tile that is computed.
TILE, STEP = (20, 60), (7, 15)

#: Overhead in calls of a piece of keys, forward and backward.
PIECE_FORWARD, PIECE_BACKWARD = 16, 40


#: Reads and writes of each byte that is read back: for the gradient of its reductions, and for the sum of that and
#: the cotangent.
RECALL_ACCESSES = 9


class Operators:
    """Figures of a network's operators as columns, in its order, so that a pass over many is one sum.

    Attributes:
        row: The row of each node, by its serial.
        flops: Floating-point operations of forward.
        traffic: Bytes that forward reads and writes.
        work: Operations, comparable between operators.
        size: Bytes of the largest map.
        vectors: Bytes of vectors.
        far: Bytes a second on large maps.
        views: It makes a view.
        inplace: It overwrites its input.
        attends: It is an attention.
        uncut: Bytes of the gradient of a map that is uncut, to all of which each tile adds.
        maps: Some of its maps require grad.
        trained: Some of its vectors require grad.
        unread: It can be pulled back without its result.
    """

    def __init__(self, network: Network, rates: Rates) -> None:
        order = network.order
        profiles = [network.profiles[n.serial] for n in order]

        def column(figures: Sequence[Any], dtype: type = float) -> np.ndarray:
            return np.array(figures, dtype=dtype)

        self.rates = rates
        self.row = {n.serial: i for i, n in enumerate(order)}
        self.flops = column([p.flops for p in profiles])
        self.traffic = column([p.traffic for p in profiles])
        self.work = column([p.work for p in profiles])
        self.size = column([max(v.bytes for v in (*n.maps, *n.outputs)) for n in order])
        self.vectors = column([sum(v.bytes for v in n.vectors) for n in order])
        windows = [rates.pool if n.op.kind == "window" else rates.memory for n in order]
        self.far = column([rates.reorder if p.flops else w for p, w in zip(profiles, windows, strict=True)])
        self.views = column([p.views is not None for p in profiles], bool)
        self.inplace = column([n.inplace is not None for n in order], bool)
        self.attends = column([isinstance(n.op, Attention) for n in order], bool)
        uncut = [isinstance(n.op, Uncut) and n.outputs[0].requires_grad for n in order]
        self.uncut = column([n.outputs[0].bytes if u else 0 for n, u in zip(order, uncut, strict=True)])
        self.maps = column([any(v.requires_grad for v in n.maps) for n in order], bool)
        self.trained = column([any(v.requires_grad for v in n.vectors) for n in order], bool)
        self.unread = column([needs_no_result(n) for n in order], bool)

    def rows(self, nodes: Sequence[Node]) -> np.ndarray:
        return np.array([self.row[n.serial] for n in nodes], dtype=np.intp)

    def whole_seconds(self, rows: np.ndarray, size: Any) -> np.ndarray:
        """Seconds of whole nodes, computed in tiles of ``size`` bytes, without those of starting each. A result needs
        memory and, if it is large, fresh memory."""
        rates, far = self.rates, self.far[rows]
        byte = np.where(far == rates.pool, 1 / rates.pool, rates.byte(size, far))
        seconds: np.ndarray = np.where(
            self.views[rows], 0.0, self.flops[rows] / rates.flops + self.traffic[rows] * byte
        )
        return seconds

    def start_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of starting nodes once; each start reads their vectors."""
        vectors = np.where(self.views[rows], 0.0, self.vectors[rows])
        return self.rates.call + vectors * self.rates.byte(vectors, self.rates.memory)

    def seconds(
        self, rows: np.ndarray, shares: np.ndarray, tiles: int, backward: bool = False, pieces: int = 1
    ) -> np.ndarray:
        """Seconds of nodes in one pass over all tiles, which together compute ``shares`` of each: forward, or
        gradients of maps."""
        size = self.size[rows] * shares / tiles
        if not backward:
            size = np.where(self.inplace[rows], 0.0, size)
        seconds = tiles * self.start_seconds(rows) + shares * self.whole_seconds(rows, size)
        if pieces > 1:
            calls = tiles * pieces * (PIECE_BACKWARD if backward else PIECE_FORWARD)
            seconds += self.attends[rows] * calls * self.rates.call
        return seconds

    def backward_seconds(self, rows: np.ndarray, shares: np.ndarray, tiles: int, pieces: int = 1) -> float:
        """Seconds of nodes' backward: gradients of maps, and those of vectors, which are added up over tiles."""
        rates, vectors, uncut = self.rates, self.vectors[rows], self.uncut[rows]
        passes = 1.0 * self.maps[rows] + (self.trained[rows] & (self.flops[rows] > 0))
        seconds = passes * self.seconds(rows, shares, tiles, True, pieces)
        seconds += 3 * np.maximum(0.0, shares - 1) * uncut * rates.byte(uncut, rates.memory)
        seconds += 3 * (tiles - 1) * self.trained[rows] * vectors * rates.byte(vectors, rates.memory)
        return float(seconds.sum())

    def least_seconds(self, trains: bool) -> tuple[np.ndarray, np.ndarray]:
        """A lower bound of each node's seconds in any tiles: of forward, and of both passes."""
        every = np.arange(len(self.row))
        forward = self.whole_seconds(every, 0.0) + self.start_seconds(every)
        if not trains:
            return forward, forward
        passes = np.where(self.unread, 1, 2) + self.maps + (self.trained & (self.flops > 0))
        return forward, passes * forward


class CostModel(Peaks):
    """Costs of the segments of one network."""

    def __init__(self, network: Network, rates: Rates) -> None:
        super().__init__(network)
        self.rates = rates
        self.operators = Operators(network, rates)
        #: The tiles that stand for a scan's, for both directions and wherever its maps lie.
        self._scanned: dict[Hashable, list[Tile]] = {}

    def peak(self, tiles: SampleTiles, interval: TiledInterval, backward: bool) -> int:
        """Bytes of the largest tile. Backward also holds the gradients of vectors that are added to those of earlier
        tiles."""
        found = (self.tile_at(tiles, i, interval.pieces) for i in range(tiles.count))
        most = max(tile.peak(interval, backward) for tile in found if tile is not None)
        return most + (self.vector_gradient_bytes(tiles.program) if backward and tiles.grid.tiles > 1 else 0)

    def middle_peak(self, tiles: SampleTiles, interval: TiledInterval, backward: bool) -> int:
        """Bytes of a tile in the middle, a quick lower bound of `peak`: grids whose middle tile is too large are left
        out."""
        tile = self.tile_at(tiles, tiles.count // 2, interval.pieces)
        return self.peak(tiles, interval, backward) if tile is None else tile.peak(interval, backward)

    def tile_at(self, tiles: SampleTiles, i: int, pieces: int) -> Tile | None:
        """One of the tiles that stand for all; None if it has no share in any target."""
        key = i, pieces
        if key not in tiles.cache:
            need = tiles.boxes(i)
            tiles.cache[key] = None if need is None else self.tile(tiles.program, need, pieces)
        found: Tile | None = tiles.cache[key]
        return found

    def pass_cost(
        self, tiles: SampleTiles, backward: bool, distinct: float = ALL, pieces: int = 1
    ) -> tuple[float, float]:
        """(seconds, operations forward) of one pass over all tiles: forward, or recomputation and backward.

        Of identical tiles only the share ``distinct`` is computed; all are written, and given their gradients. Backward
        shares none where what is read needs gradients.
        """
        program, count = tiles.program, tiles.grid.tiles
        if backward and any(v.requires_grad for v in program.reads):
            distinct = ALL
        seconds, work = self.pass_seconds(program, tiles.shares, count, backward, distinct, pieces)
        if distinct != ALL:  # what tiles of background still cost decides how many of them there should be
            tile, step = (sum(calls) if backward else calls[0] for calls in (TILE, STEP))
            seconds += count * (tile + distinct * len(program.nodes) * step) * self.rates.call
        return seconds, work

    def pass_seconds(
        self, program: Program, shares: np.ndarray, tiles: int, backward: bool, distinct: float = ALL, pieces: int = 1
    ) -> tuple[float, float]:
        """(seconds, operations forward) of computing a share of all tiles, which together compute ``shares`` of each
        node, and of storing all. Backward does not compute results that no operator reads ([Note: unread] in
        `rules.unread`); what is stored is computed once, whatever the grid."""
        operators = self.operators
        rows = operators.rows(program.nodes)
        times, work = operators.seconds(rows, shares, tiles, pieces=pieces), float(shares @ operators.work[rows])
        forward, stored = float(times.sum()), self.store_seconds(program, False)
        if not backward:
            return distinct * forward + stored, work
        gone = operators.rows([n for n in program.nodes if n.serial in program.unread])
        gone = gone[operators.unread[gone]]
        forward -= float(operators.seconds(gone, np.ones(len(gone)), tiles).sum())
        back = operators.backward_seconds(rows, shares, tiles, pieces)
        stored += self.store_seconds(program, True)
        return distinct * (forward + back) + stored, work - float(operators.work[gone].sum())

    def recall_cost(self, tiles: SampleTiles, distinct: float = ALL) -> tuple[float, float]:
        """(seconds, operations) of a backward pass that reads stored results back; see [Note: recall] in
        `program.program`. The reductions of a tile make a gradient as large as itself, to which the cotangent is
        added."""
        left = BackwardProgram.of(tiles.program)
        size = sum(v.bytes for v in left.maps)
        seconds, work = self.pass_cost(SampleTiles(left.program, tiles.grid), True, distinct)
        read = RECALL_ACCESSES * size * self.rates.byte(size / tiles.grid.tiles, self.rates.memory)
        return seconds + float(read), work

    def scan(self, program: Program, scans: Scans, interval: TiledInterval, backward: bool) -> Cost:
        """Cost of a pass whose tiles hand rows on; see [Note: scan] in `program.scan`."""
        most, carried = self.scan_bytes(program, scans, interval, backward)
        passed = self.pass_seconds(program, scans.shares(program), scans.tiles, backward)
        return Cost(most, *passed, carried=carried)

    def scan_bytes(self, program: Program, scans: Scans, interval: TiledInterval, backward: bool) -> tuple[int, int]:
        """Bytes of a scan's largest tile, and of all rows that its tiles hand on."""
        parts = scans.parts(program)
        kept = list(map(sum, zip(*(part.kept for part in parts), strict=True)))
        key = program, scans, interval.pieces
        if key not in self._scanned:
            needs = (held(program, parts, i) for i in range(len(scans.samples)))
            self._scanned[key] = [self.tile(program, need, interval.pieces) for need in needs]
        peaks = [tile.peak(interval, backward) for tile in self._scanned[key]]
        if not backward:
            return max(peaks) + 2 * max(kept), sum(kept)
        # Results that are saved for their own backward are there again as a part of what the next operator reads.
        saving = [p for p, n in zip(parts, program.nodes, strict=True) if self.network.profiles[n.serial].saves_output]
        most = max(peak + sum(part.held[i].twice for part in saving) for i, peak in enumerate(peaks))
        return most + self.vector_gradient_bytes(program) + 2 * max(kept), sum(kept)

    def store_seconds(self, program: Program, backward: bool) -> float:
        """Seconds of writing tiles into stored maps or, in backward, of adding to the cotangents of maps that are
        read."""
        stored = [t.stored.bytes for t in program.targets if t.stored is not None]
        made = [v.bytes for v in program.reads if v.requires_grad]
        times, sizes = (4, made) if backward else (2, stored)
        return times * sum(float(size * self.rates.byte(size, self.rates.memory)) for size in sizes)

    def kept_seconds(self, nodes: Sequence[Node]) -> float:
        """Seconds of nodes that are run whole, forward and backward."""
        rows, once = self.operators.rows(nodes), np.ones(len(nodes))
        forward = float(self.operators.seconds(rows, once, 1).sum())
        return forward + (self.operators.backward_seconds(rows, once, 1) if self.network.trains else 0.0)
