"""One segment prepared for a run: its program, its grids, and its input tensors.

The inputs of a segment are the tensors that its operators use (parameters among them, so that each parameter gets one
gradient in a step), and a *token* for each boundary that it reads: a scalar without data that makes autograd run the
segments backward in order. `forward` evaluates tile by tile without grad. `backward` evaluates each tile again with
grad, and pulls back the tile's cotangents: its slice of each stored map's, and the same vector for each reduction. A
tile is freed before the next begins. `function` makes one `autograd.Function` of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.constants import Constants
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.frame import Frame
from lightning_plugin.graph import Value, with_requires_grad
from lightning_plugin.ops import Pieces
from lightning_plugin.plan import SegmentPlan
from lightning_plugin.program.pieces import UncutAxis, uncut_axes
from lightning_plugin.program.program import Program, Target
from lightning_plugin.program.replay import Replays
from lightning_plugin.program.tape import Inspect
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.residency.tiers import Home


class SegmentRun:
    """One run of a segment's program under its plan.

    Autograd's graph refers to this object. Therefore it refers to no results in the frame, only to images.

    Attributes:
        scans: True if tiles run in order, and each hands rows to the next.
        home: Tier of the stored maps, with the queue of its transfers.
        stored: The boundaries that the segment makes.
        boundaries: The boundaries that it reads.
        spreads: The maps that it reads from ordinary tensors.
        sources: The images that it reads box by box.
        images: The images among these that need a gradient.
        outputs: The vectors that it reduces.
        recalls: The reductions of each stored map that backward reads back.
        uncut_axes: The axis along which tiles read a boundary in pieces, for each such boundary.
        known_constants: Constant parts of the maps that it reads; see [Note: background] in `constants`.
        groups_tiles: Group identical tiles; see [Note: identical tiles] in `tile_pass`.
        tile_groups: The places of identical tiles on each grid, found once in a step.
        observe: Observer of each operator's tiles, if there is one.
        replays: The replays of its passes.
        can_replay: True if its passes are made of ATen calls on tensors of the device alone.
    """

    def __init__(self, program: Program, frame: Frame, plan: SegmentPlan, home: Home, place: int, replays: Replays):
        self.plan = plan
        self.step = frame.step
        self.ledger, self.team, self.rehearsal = self.step.ledger, self.step.team, self.step.rehearsal
        self.observe: Inspect | None = None if self.step.watch is None else self.step.watch.check
        self.scans = plan.halo == "share"
        self.place = place
        self.backward_grid = plan.backward
        self.home = home
        self.program = program
        self.autocast_type = program.targets[0].map.autocast_type
        self.stored = [t.stored for t in program.targets if t.stored is not None]
        self.spreads = [v for v in program.reads if frame.ordinary_tensor(v) is not None]
        # An image that a kept segment has made whole is an ordinary tensor, and would get its gradient twice.
        images = frame.bindings.images
        self.sources = {v: images[v] for v in program.reads if v in images and v not in frame.whole_maps}
        self.images = [v for v, image in self.sources.items() if v.requires_grad and image.tensor is not None]
        self.boundaries = [v for v in program.reads if v in frame.boundaries and frame.ordinary_tensor(v) is None]
        self.outputs = [v for t in program.targets if t.stored is None for v in t.node.outputs]
        self.recalls: Mapping[Target, Sequence[Target]] = program.recallable if self.plan.recall else {}
        self.uncut_axes = uncut_axes(program, self.boundaries) if self.plan.pieces > 1 else {}
        self.trains = any(v.requires_grad for v in (*self.outputs, *self.stored))
        self.known_constants = {v: found for v in program.reads if (found := self.find_constants(v, frame)) is not None}
        # Tiles can be identical only if all inputs have known parts, and no operator depends on a tile's position.
        known = bool(program.reads) and len(self.known_constants) == len(program.reads)
        whole = not self.scans and not self.uncut_axes
        self.groups_tiles = known and whole and all(n.op.uniform for n in program.nodes)
        self.tile_groups: dict[Grid, list[list[int]]] = {}
        step, lower = self.step, home.tier != "device" or frame.streams is not None
        special = self.scans or self.known_constants or step.team or step.rehearsal or step.watch or step.compiler
        self.replays = replays
        self.can_replay = not (lower or special) and all(i.tensor is not None for i in self.sources.values())

    def find_constants(self, v: Value, frame: Frame) -> Constants | None:
        """Return the known constant parts of an input, if the plan counts on them. A rehearsal assumes that there are
        some, so that it measures the memory of finding them."""
        if self.place >= frame.background_segments:
            return None
        if v in self.boundaries:
            return frame.boundaries[v].constants
        image, tensor = self.sources.get(v), frame.ordinary_tensor(v)
        if self.rehearsal is not None:
            return Constants(v.space.extent)
        if image is not None:
            return image.background
        return None if tensor is None else Constants.from_tensor(v.space, tensor)

    def is_near_constant(self, need: Mapping[Value, Box]) -> bool:
        """True if an input of a tile is constant in part, so that its results may be."""
        if self.rehearsal is not None:
            return bool(self.known_constants)
        return any(found.has_constant(need[key]) for key, found in self.known_constants.items() if key in need)

    def of_part(self, program: Program, frame: Frame) -> SegmentRun:
        """Return the run of one part of the program; see [Note: parts] in `program.program`."""
        return SegmentRun(program, frame, self.plan, self.home, self.place, self.replays)

    def memory(self, boundaries: Iterable[Boundary | Cotangent]) -> list[Tensor] | None:
        """Return the tensors that a pass reads and writes beside its inputs; None if it cannot be replayed."""
        if not self.can_replay:
            return None
        found = [boundary.on_device for boundary in boundaries]
        found += [image.tensor for v, image in self.sources.items() if v not in self.images]
        return None if any(t is None for t in found) else found  # type: ignore[return-value]

    def narrow(self, targets: Sequence[Target]) -> SegmentRun:
        """Return the run of a program that makes some of the targets, with this run's vectors, spread vectors and
        images."""
        program = self.program.narrow(targets)
        if program is self.program:
            return self
        run = copy(self)
        run.program = program
        run.stored = [t.stored for t in targets if t.stored is not None]
        run.outputs = [v for t in targets if t.stored is None for v in t.node.outputs]
        run.boundaries = [v for v in program.reads if v in self.boundaries]
        run.tile_groups = {}  # a shorter program groups tiles in another way
        return run

    def check_images(self) -> None:
        """Raise an error if an image was changed since forward."""
        for v, image in self.sources.items():
            if image.changed:
                raise RecordingError(
                    f"an image of shape {v.shape} was changed in place after forward and before backward, which reads "
                    "it again. Pull back first, or give each step a tensor of its own (x.clone())."
                )

    def inputs(self, frame: Frame) -> list[Tensor]:
        """Return the inputs of the autograd function: vectors, spread vectors, images with grad, tokens."""
        vectors = [frame.vector(v) for v in self.program.vectors]
        spreads = [t for v in self.spreads if (t := frame.ordinary_tensor(v)) is not None]
        images = [with_requires_grad(t, True) for v in self.images if (t := self.sources[v].tensor) is not None]
        return [*vectors, *spreads, *images, *(frame.tokens[v] for v in self.boundaries)]

    def split_inputs(
        self, inputs: Sequence[Tensor]
    ) -> tuple[dict[Value, Tensor], dict[Value, Tensor], dict[Value, Tensor]]:
        """Split the inputs into vectors, spread vectors and images, each by value."""
        first, second = len(self.program.vectors), len(self.program.vectors) + len(self.spreads)
        return (
            dict(zip(self.program.vectors, inputs, strict=False)),
            dict(zip(self.spreads, inputs[first:], strict=False)),
            dict(zip(self.images, inputs[second:], strict=False)),
        )

    def read(
        self,
        v: Value,
        box: Box,
        spreads: Mapping[Value, Tensor],
        boundary: Boundary | None,
        add_gradient: Callable[[Box, Tensor], None] | None = None,
    ) -> Tensor | Pieces:
        """Read a tile of an input: a boundary, a spread vector or an image. If a boundary is read in pieces,
        ``add_gradient`` is called with the gradient of each."""
        if boundary is not None:
            axis = self.uncut_axes.get(v)
            if axis is None:
                return boundary.read(box)
            return read_pieces(boundary, axis, box, self.plan.pieces, add_gradient)
        if v in spreads:
            return v.space.narrow(spreads[v], Box.whole(v.space.extent), box)
        with self.step.progress.waiting("input"):
            tile = self.sources[v].read(box)
        if self.observe is not None and v.node is not None:
            self.observe(v.node, tile, [box])
        return tile

    def inputs_of_part(self, part: SegmentRun, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Select the inputs of a narrowed run among this run's."""
        vectors, spreads, _ = self.split_inputs(inputs)
        return [*(vectors[v] for v in part.program.vectors), *spreads.values()]

    def new_constants(self, v: Value, frame: Frame) -> Constants | None:
        """Make cells for the constant parts of a stored map, if it may have some and a later segment uses them."""
        is_used = self.place + 1 < frame.background_segments
        return Constants(v.space.extent) if self.known_constants and is_used else None


#: Pieces that a rehearsal reads: the first, which allocates sums, one that is added, and one after that.
REHEARSED_PIECES = 3


def read_pieces(
    boundary: Boundary, axis: UncutAxis, box: Box, count: int, add_gradient: Callable[[Box, Tensor], None] | None = None
) -> Pieces:
    """Read a box of a boundary in ``count`` pieces; ``add_gradient`` is called with the gradient of each."""
    boxes, ends = axis.boxes(box, count), tuple(end * axis.inner for end in axis.ends(count))
    if boundary.home.queue.make_stand_in is not None:
        ends = ends[: REHEARSED_PIECES + 1]

    def read(piece: int) -> Tensor:
        return boundary.read(boxes[piece]).detach()

    def pull(piece: int, gradient: Tensor) -> None:
        assert add_gradient is not None
        add_gradient(boxes[piece], gradient)

    token = torch.zeros((), device=boundary.device, requires_grad=add_gradient is not None)
    return Pieces(ends, read, None if add_gradient is None else pull, token)
