"""Memory of one tile of a segment, predicted without running anything.

A tile's life is followed node by node, as `Program.run` would run it: tiles are made, read for the last time and let
go; with grad, what an operator saves stays until its turn in backward comes, where the gradients of its inputs are
made and that of its output is let go.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_plugin.boxes import Box
from lightning_plugin.execute.program import Program
from lightning_plugin.graph import Node, Value
from lightning_plugin.planner.network import Network
from lightning_plugin.rules.base import ReduceOp, Source
from lightning_plugin.rules.reduce import wide
from lightning_plugin.rules.window import WindowOp
from lightning_plugin.source import TensorSource


def tile_bytes(v: Value, box: Box) -> int:
    whole = Box.whole(v.space.extent).positions
    return v.bytes * box.positions // max(1, whole)


class Peaks:
    """Peaks of tiles, and of whole intervals that are kept, of one network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        #: Maps on a lower tier, while a segment is costed: reading a tile of them makes a copy.
        self.spilled: frozenset[int] = frozenset()
        #: Whether what the segment stores goes to a lower tier: writing a tile makes a copy, and so does reading its
        #: cotangent.
        self.leaving = False

    def share(self, node: Node, need: dict[int, Box]) -> float:
        """Which part of the whole operator a tile computes."""
        v = node.maps[0] if isinstance(node.op, ReduceOp) else node.outputs[0]
        box = need.get(id(v))
        return 0.0 if box is None else box.positions / max(1, Box.whole(v.space.extent).positions)

    def away(self, program: Program, need: dict[int, Box]) -> dict[int, int]:
        """The tiles of a segment's stored maps."""
        stored = [t.stored for t in program.targets if t.stored is not None and id(t.stored) in need]
        return {id(v): tile_bytes(v, need[id(v)]) for v in stored}

    def vectors(self, program: Program) -> int:
        """The gradients of vectors that a tile makes before they are added to those of earlier tiles."""
        return sum(v.bytes for v in program.vectors if v.requires_grad)

    def read_bytes(self, v: Value, box: Box) -> int:
        """What reading a tile allocates: nothing where it is a view of what lies on the device."""
        if v.node is not None and isinstance(v.node.op, Source):
            image = v.node.op.image
            there = isinstance(image, TensorSource) and image.tensor.device == v.node.op.device
            return 0 if there else tile_bytes(v, box)
        return tile_bytes(v, box) if id(v) in self.spilled else 0

    def padded(self, node: Node, need: dict[int, Box]) -> int:
        """What padding a border tile by hand allocates."""
        op = node.op
        if not isinstance(op, WindowOp) or id(node.outputs[0]) not in need:
            return 0
        clips = op.clips(need[id(node.outputs[0])])
        if all(c.before == c.after for c in clips):
            return 0
        return tile_bytes(node.maps[0], need[id(node.maps[0])])

    def forward_peak(self, program: Program, need: dict[int, Box]) -> int:
        size: dict[int, int] = {}
        alias: dict[int, int] = {}
        away = self.away(program, need) if self.leaving else {}
        live = 0
        peak = 0
        for v in program.reads:
            if id(v) in need:
                size[id(v)] = self.read_bytes(v, need[id(v)])
                live += size[id(v)]
        for place, node in enumerate(program.steps):
            peak = max(peak, live + self.padded(node, need) + self.scratch(node, need))
            if not isinstance(node.op, ReduceOp) and id(node.outputs[0]) in need:
                out = node.outputs[0]
                source = self.shares(program, node)
                if source is not None:
                    alias[id(out)] = alias.get(id(source), id(source))
                else:
                    size[id(out)] = tile_bytes(out, need[id(out)])
                    live += size[id(out)]
                    extra = self.extra(node, need)
                    peak = max(peak, live + self.padded(node, need) + self.scratch(node, need) + extra)
                if id(out) in away:
                    peak = max(peak, live + away[id(out)])
            live -= self.release(program, place, node, size, alias)
        return peak

    def scratch(self, node: Node, need: dict[int, Box]) -> int:
        """What a node needs for a moment in forward."""
        if isinstance(node.op, ReduceOp):
            return 0  # forward accumulates, which the profile of backward's form says nothing about
        return int(self.network.profiles[node.serial].scratch * self.share(node, need))

    def scratch_backward(self, node: Node, need: dict[int, Box]) -> int:
        return int(self.network.profiles[node.serial].scratch_backward * self.share(node, need))

    def extra(self, node: Node, need: dict[int, Box]) -> int:
        return int(self.network.profiles[node.serial].extra * self.share(node, need))

    def shares(self, program: Program, node: Node) -> Value | None:
        """The input whose memory a node's result lies in."""
        views = self.network.profiles[node.serial].views
        if views is not None:
            return node.maps[views]
        return node.maps[0] if node.serial in program.overwrite else None

    def release(self, program: Program, place: int, node: Node, size: dict[int, int], alias: dict[int, int]) -> int:
        """What is let go when a node has run: tiles that nobody reads any more, under any of their names."""
        freed = 0
        for v in dict.fromkeys((*node.maps, *(o for o in node.outputs if o.is_map))):
            if program.last_use.get(id(v), -1) > place:
                continue
            owner = alias.pop(id(v), id(v))
            others = any(o == owner for o in alias.values())
            still = program.last_use.get(owner, -1) > place
            if not others and not still:
                freed += size.pop(owner, 0)
        return freed

    def backward_peak(self, program: Program, need: dict[int, Box], ends: int = 0) -> int:
        """The tile's forward with grad, then its backward, node by node; ``ends`` is what the cotangents take."""
        size: dict[int, int] = {}
        owner: dict[int, int] = {}
        holders: dict[int, int] = {}
        live = peak = 0

        def hold(key: int) -> None:
            holders[key] = holders.get(key, 0) + 1

        def drop(key: int) -> int:
            holders[key] -= 1
            return size.pop(key, 0) if not holders[key] else 0

        for v in program.reads:
            if id(v) in need:
                owner[id(v)] = id(v)
                size[id(v)] = self.read_bytes(v, need[id(v)])
                live += size[id(v)]
                hold(id(v))
        saved: list[tuple[Node, list[int], int]] = []
        stored = {id(t.stored) for t in program.targets if t.stored is not None}
        for place, node in enumerate(program.steps):
            p = self.network.profiles[node.serial]
            reduce = isinstance(node.op, ReduceOp)
            out = node.outputs[0]
            if not reduce and id(out) not in need:
                continue
            keys: list[int] = []
            extra = 0
            if not reduce:
                source = self.shares(program, node)
                owner[id(out)] = owner[id(source)] if source is not None else id(out)
                if source is None:
                    size[id(out)] = tile_bytes(out, need[id(out)])
                    live += size[id(out)]
                hold(owner[id(out)])
                if id(out) in stored:
                    hold(owner[id(out)])
            grad = any(v.requires_grad for v in node.outputs)
            if grad:
                keys = [owner[id(node.maps[i])] for i in p.saves]
                if not reduce and p.saves_output:
                    keys.append(owner[id(out)])
                extra = self.extra(node, need) + self.padded(node, need)
                for k in keys:
                    hold(k)
                live += extra
            saved.append((node, keys, extra))
            passing = self.network.profiles[node.serial].scratch * self.share(node, need) if grad else 0
            peak = max(peak, live + int(passing) + (0 if grad else self.extra(node, need) + self.padded(node, need)))
            for v in dict.fromkeys((*node.maps, *(o for o in node.outputs if o.is_map))):
                if program.last_use.get(id(v), -1) <= place and id(v) in owner:
                    live -= drop(owner[id(v)])
        grads: dict[int, int] = {}
        live += ends + (sum(self.away(program, need).values()) if self.leaving else 0)
        peak = max(peak, live)
        for node, keys, extra in reversed(saved):
            if any(v.requires_grad for v in node.outputs):
                made = 0
                for v in dict.fromkeys(node.maps):
                    if v.requires_grad and id(v) in need:
                        size_in = tile_bytes(v, need[id(v)])
                        if id(v) in grads:
                            made = max(made, size_in)  # a second gradient is added to the first
                        elif self.network.profiles[node.serial].views is None:
                            grads[id(v)] = size_in
                            live += size_in
                        else:
                            grads[id(v)] = grads.pop(id(node.outputs[0]), size_in)
                peak = max(peak, live + made + self.scratch_backward(node, need))
                if not isinstance(node.op, ReduceOp):
                    live -= grads.pop(id(node.outputs[0]), 0)
            for k in keys:
                live -= drop(k)
            live -= extra
        adding = [tile_bytes(v, need[id(v)]) for v in program.reads if id(v) in self.spilled and id(v) in need]
        return max(peak, live + max(adding, default=0))

    def kept_peak(self, begin: int, end: int) -> int:
        """The most that a kept interval holds while it runs, forward or backward, gradients of its ends included."""
        network = self.network
        nodes = [n for n in network.order[begin:end] if not (isinstance(n.op, ReduceOp) and n.serial in network.fused)]
        made = {id(v) for n in nodes for v in n.outputs}
        reads = {id(v): v for n in nodes for v in n.maps if id(v) not in made}
        alive = {id(v): v for v in network.alive[end]}
        last = {id(v): place for place, n in enumerate(nodes) for v in n.maps}
        last.update({key: len(nodes) for key in alive})
        overwrite = frozenset(
            n.serial for n in nodes if n.inplace is not None and network.root(n.outputs[0]) is not n.outputs[0]
        )
        program = Program((), tuple(nodes), tuple(reads.values()), (), last, overwrite)
        need = {id(v): Box.whole(v.space.extent) for n in nodes for v in (*n.maps, *n.outputs) if v.is_map}
        if not network.trains:
            return self.forward_peak(program, need)
        ends = sum(v.bytes for k, v in alive.items() if v.requires_grad and k in made)
        return max(self.backward_peak(program, need, ends), self.forward_peak(program, need))

    def cotangent(self, maps: Sequence[Value]) -> int:
        """What the cotangents of maps that are stored on the device hold."""
        return sum(v.bytes * wide(v.dtype).itemsize // v.dtype.itemsize for v in maps if v.requires_grad)
