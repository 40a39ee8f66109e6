"""The nodes in the order in which segments run through them.

Nodes are sorted by *stage* (how many statistics have to be known first) and then by the order in which they were
recorded, so that a segment is an interval of this order that lies within one stage. A *cut* is a place between two
nodes; what is alive there, made before and read after, is stored. Every place is a valid cut of every graph; the good
ones are where little is alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lightning_plugin.execute.keep import find_batch_norms
from lightning_plugin.graph import Node, Recording, Value, background_of
from lightning_plugin.ops import Barrier, Gather, ReduceOp, Source, Spread, TileOp, accumulation_dtype
from lightning_plugin.planner.analysis.background import Scene, scene
from lightning_plugin.planner.analysis.profile import Profile, profile
from lightning_plugin.planner.overhead import Repeats
from lightning_plugin.program.findings import Library
from lightning_plugin.program.fixed import spatial_axes, stages
from lightning_plugin.program.pieces import source_of_uncut


@dataclass(eq=False)
class Network:
    """A recording, with the facts that planning derives from it.

    Attributes:
        recording: The operators, with their images and tensors.
        accumulates: Parameters have gradients when a step begins, as in all steps of a training but the first; else
            they have those that they have now.
        owed: The bytes that an optimizer keeps, or will keep, for each tensor, by identity.
        below: The tier of each tensor that lives below the device already, by identity.
        space: The number of axes of space, for a network without an image of its own.
        library: Tiles, tapes and bytes of tile passes that rehearsals have found.
        repeats: Keys of operators and programs that are equal; see [Note: repeats] in `overhead`.
    """

    recording: Recording
    accumulates: bool = False
    owed: Mapping[int, int] = field(default_factory=dict)
    below: Mapping[int, str] = field(default_factory=dict)
    space: int | None = None
    library: Library = field(default_factory=Library)
    repeats: Repeats = field(default_factory=Repeats)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.recording.nodes

    @cached_property
    def axes_of_space(self) -> int | None:
        """The number of axes of space, which those of images follow; None if it is not known."""
        found = spatial_axes(self.nodes)
        return self.space if found is None else found

    def has_gradient(self, v: Value) -> bool:
        """True if a captured tensor has a gradient when a step begins."""
        capture = self.recording.bindings.captures.get(v)
        if capture is None or not capture.tensor.is_leaf or not v.requires_grad:
            return False
        return self.accumulates or capture.tensor.grad is not None

    @cached_property
    def stage(self) -> dict[int, int]:
        """The stage of every node that touches maps."""
        of = stages(self.nodes, set())
        return {
            n.serial: of[n.outputs[0]] - isinstance(n.op, ReduceOp)
            for n in self.nodes
            if isinstance(n.op, (TileOp, ReduceOp))
        }

    @cached_property
    def order(self) -> tuple[Node, ...]:
        """The nodes that touch maps, by stage and then as recorded."""
        work = [n for n in self.nodes if n.serial in self.stage]
        return tuple(sorted(work, key=lambda n: (self.stage[n.serial], n.serial)))

    @cached_property
    def background(self) -> Scene:
        """Known constant parts of the images; see [Note: shared work] in `background`."""
        images = self.recording.bindings.images
        return scene(dict(zip(images, background_of(images.values()), strict=True)), self.order)

    @cached_property
    def place(self) -> dict[int, int]:
        """Index of each node among all nodes, by which plans name it."""
        return {n.serial: i for i, n in enumerate(self.nodes)}

    @cached_property
    def profiles(self) -> dict[int, Profile]:
        """The `profile` of every node in the order; equal nodes (as in the blocks of a ResNet) are profiled once."""
        known: dict[int, Profile] = {}
        found = {}
        for n in self.order:
            key = self.repeats.number(n)
            if key not in known:
                known[key] = profile(n)
            found[n.serial] = known[key]
        return found

    @cached_property
    def made(self) -> dict[Value, int]:
        """Position in the order at which each map is made."""
        return {v: i for i, n in enumerate(self.order) for v in n.outputs if v.is_map}

    @cached_property
    def last_read(self) -> dict[Value, int]:
        """Position of the last node that reads each map; a gather reads its map at once, where it is made."""
        last: dict[Value, int] = {}
        for i, n in enumerate(self.order):
            for v in n.maps:
                last[v] = i
        return last

    @cached_property
    def first_read(self) -> dict[Value, int]:
        """Position of the first node that reads each map."""
        return {v: i for i, n in reversed(list(enumerate(self.order))) for v in n.maps}

    @cached_property
    def fused(self) -> dict[int, Node]:
        """Statistics and normalisations that run in one kernel where they are kept (see `execute.keep`)."""
        return find_batch_norms(self.order, self.nodes)

    @cached_property
    def key_cuts(self) -> set[int]:
        """Cuts that reading keys piece by piece needs: those before an attention with all that its keys are made of,
        and those behind it."""
        found = set()
        for i, n in enumerate(self.order):
            made = [n.maps[place] for place in (n.op.inputs_in_pieces if isinstance(n.op, TileOp) else ())]
            sources = [source for v in made if (source := source_of_uncut(v)) is not None]
            if made and len(sources) == len(made) and all(v in self.made for v in sources):
                found |= {max(self.made[v] for v in sources) + 1, i + 1}
        return found

    @cached_property
    def gathered(self) -> set[Value]:
        return {n.inputs[0] for n in self.nodes if isinstance(n.op, Gather)}

    @cached_property
    def alive(self) -> tuple[tuple[Value, ...], ...]:
        """The maps that are alive at each cut; cut ``i`` lies before node ``i``."""
        found: list[tuple[Value, ...]] = [()]
        now: dict[Value, None] = {}
        for i, n in enumerate(self.order):
            for v in n.outputs:
                if v.is_map and self.last_read.get(v, -1) > i:
                    now[v] = None
            for v in n.maps:
                if self.last_read[v] == i:
                    now.pop(v, None)
            found.append(tuple(now))
        return tuple(found)

    @cached_property
    def trains(self) -> bool:
        return any(v.requires_grad for n in self.order for v in n.outputs)

    @cached_property
    def barriers(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if isinstance(n.op, Barrier))

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of captured tensors and of parameters not recorded, with their gradients and the optimizer's state."""
        return sum(map(self.resident_bytes, self.captured)) + self.unrecorded_bytes

    @cached_property
    def unrecorded_bytes(self) -> int:
        """Bytes of parameters that were not recorded, with their gradients and the optimizer's state."""
        tensors = self.recording.unrecorded
        gradients = (t.nbytes for t in tensors if t.grad is not None or (t.requires_grad and self.trains))
        return sum(t.nbytes + self.owed.get(id(t), 0) for t in tensors) + sum(gradients)

    @cached_property
    def computed_bytes(self) -> int:
        """Bytes of captured tensors that the call has computed, such as standardised weights, and that autograd
        holds."""
        tensors = (self.recording.bindings.captures[v].tensor for v in self.captured)
        return sum(t.nbytes for t in tensors if t.grad_fn is not None) if self.trains else 0

    @cached_property
    def weight_gradient_bytes(self) -> int:
        """Bytes of the gradients of captured leaves on the device."""
        tensors = (self.recording.bindings.captures[v].tensor for v in self.captured if self.tier_of(v) is None)
        return sum(t.nbytes for t in tensors if t.requires_grad and t.is_leaf)

    @cached_property
    def captured(self) -> list[Value]:
        """The tensors that the network uses: parameters, buffers and others of the user's."""
        captures = self.recording.bindings.captures
        return [v for n in self.nodes for v in n.outputs if v in captures]

    def resident_bytes(self, v: Value) -> int:
        """Bytes of a captured tensor, with its gradient and the optimizer's state for it."""
        t = self.recording.bindings.captures[v].tensor
        return t.numel() * t.element_size() * (2 if t.requires_grad else 1) + self.optimizer_bytes(v)

    def optimizer_bytes(self, v: Value) -> int:
        """Bytes of the optimizer's state for a captured tensor."""
        return self.owed.get(id(self.recording.bindings.captures[v].tensor), 0)

    def tier_of(self, v: Value) -> str | None:
        """The lower tier that a captured tensor lives on already; None for the device."""
        return self.below.get(id(self.recording.bindings.captures[v].tensor))

    @cached_property
    def image_bytes(self) -> int:
        return sum(n.outputs[0].bytes for n in self.nodes if isinstance(n.op, Source))

    @cached_property
    def plain_bytes(self) -> int:
        """Bytes that plain PyTorch holds for backward: each map that some operator saves, once, what operators save
        besides, and the input."""
        return self.image_bytes + self.saved_bytes(0, len(self.order)) + self.saved_at_barriers

    @cached_property
    def saved_at_barriers(self) -> int:
        """Bytes that barriers save for backward, and those of their results that other operators save, beyond maps that
        `kept_maps` has."""
        saved = {v.node.inputs[0] for v in self.saved_roots if v.node is not None and isinstance(v.node.op, Spread)}
        extra = 0
        for n in self.barriers:
            if any(v.requires_grad for v in n.outputs):
                p = profile(n)
                saved.update(n.inputs[i] for i in p.saves)
                saved.update(n.outputs[:1] if p.saves_output else ())
                extra += p.extra
        made = [v for v in saved if v.node is not None]
        maps = {self.root(v.node.inputs[0]) for v in made if isinstance(v.node.op, Gather)}  # type: ignore[union-attr]
        results = [v for v in made if isinstance(v.node.op, Barrier)]  # type: ignore[union-attr]
        return extra + sum(v.bytes for v in (*results, *(maps - self.saved_roots)) if not is_given(v))

    @cached_property
    def made_bytes(self) -> int:
        """Bytes of all maps and of the results of barriers: views and results in place have those of their inputs."""
        maps = {self.root(v) for n in self.order for v in n.outputs if v.is_map}
        return sum(v.bytes for v in maps if not is_given(v)) + sum(v.bytes for n in self.barriers for v in n.outputs)

    @cached_property
    def index_bytes(self) -> int:
        """The part of `plain_bytes` that is neither a map nor the input: pooling indices, masks."""
        return sum(self.profiles[n.serial].extra for n in self.order if self.saves(n))

    def saved_bytes(self, begin: int, end: int) -> int:
        """Bytes that the nodes ``[begin, end)`` hold for backward if they are kept: their maps that some operator
        saves, and extras."""
        return sum(v.bytes for v in self.kept_maps(begin, end)) + sum(
            self.profiles[n.serial].extra for n in self.order[begin:end] if self.saves(n)
        )

    def kept_maps(self, begin: int, end: int) -> list[Value]:
        """The maps made by the nodes ``[begin, end)`` whose memory some operator saves for backward."""
        roots = self.saved_roots
        return [v for n in self.order[begin:end] for v in n.outputs if v.is_map and v in roots and self.root(v) is v]

    def root(self, v: Value) -> Value:
        """The map whose memory a map lies in: views and in-place results share their input's."""
        while v.node is not None and v.node.serial in self.profiles:
            node = v.node
            views = self.profiles[node.serial].views
            if views is not None:
                v = node.maps[views]
            elif node.inplace is not None and self.last_read.get(node.maps[0]) == self.made[v]:
                v = node.maps[0]
            else:
                break
        return v

    def saves(self, node: Node) -> bool:
        """True if a node that is kept saves something for backward."""
        if isinstance(node.op, ReduceOp):
            return node.serial not in self.fused and any(v.requires_grad for v in node.outputs)
        return node.outputs[0].requires_grad

    @cached_property
    def saved_roots(self) -> set[Value]:
        """The maps whose memory some operator saves for backward."""
        roots: set[Value] = set()
        for n in self.order:
            if not self.saves(n):
                continue
            p = self.profiles[n.serial]
            roots.update(self.root(n.maps[i]) for i in p.saves)
            if p.saves_output and n.outputs[0].is_map:
                roots.add(self.root(n.outputs[0]))
        return roots


def is_given(v: Value) -> bool:
    """True for a map that lies somewhere before the network runs: an image, or a tensor of the user's."""
    return v.node is not None and isinstance(v.node.op, (Source, Spread))


def cotangent_bytes(maps: Iterable[Value]) -> int:
    """Bytes of the cotangents of stored maps, which are accumulated in float32 or wider."""
    return sum(v.bytes * accumulation_dtype(v.dtype).itemsize // v.dtype.itemsize for v in maps if v.requires_grad)
