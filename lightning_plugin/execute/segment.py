"""One segment made ready: its program, its grids, and where its tensors come from.

Inputs are the tensors that a segment's operators use (parameters among them, so that each gradient reaches its
parameter once a step), and a *token* for each boundary it reads: a number that carries no data and only tells autograd
in which order segments have to run backward. `forward` evaluates tile by tile without grad. `backward` evaluates each
tile again with grad, and pulls back the tile's cotangents: its slice of each stored map's, and the same vector for each
reduction. Nothing is left of a tile when the next one begins. `function` makes one `autograd.Function` of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from lightning_plugin.program.program import Program, Target, recallable
from lightning_plugin.program.tape import Inspect
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.residency.tiers import Home


class SegmentRun:
    """A program with what its segment's plan says, and where its tensors come from.

    Backward keeps the run, and so the run keeps nothing of the frame but images: results lead, through autograd, to the
    run itself.
    """

    def __init__(self, program: Program, frame: Frame, plan: SegmentPlan, at: Home, place: int):
        self.plan = plan
        self.step = frame.step
        self.ledger, self.team, self.rehearsal = self.step.ledger, self.step.team, self.step.rehearsal
        #: Observer of each operator's tiles, if there is one.
        self.see: Inspect | None = None if self.step.watch is None else self.step.watch.see
        #: True if tiles hand rows on, one after the other.
        self.scans = plan.halo == "share"
        self.place = place
        self.backward_grid = plan.backward
        self.at = at
        self.program = program
        self.autocast_type = program.targets[0].map.autocast_type
        self.stored = [t.stored for t in program.targets if t.stored is not None]
        self.spreads = [v for v in program.reads if frame.ordinary(v) is not None]
        #: The images that are read box by box. One that a kept segment has made whole is an ordinary tensor: counted
        #: here too, it would get its gradient twice.
        images = frame.bindings.images
        self.sources = {v: images[v] for v in program.reads if v in images and v not in frame.whole}
        self.images = [v for v, image in self.sources.items() if v.requires_grad and image.tensor is not None]
        self.boundaries = [v for v in program.reads if v in frame.stored and frame.ordinary(v) is None]
        self.outputs = [v for t in program.targets if t.stored is None for v in t.node.outputs]
        #: The reductions of each map that backward reads back.
        self.recalls: Mapping[Target, Sequence[Target]] = recallable(program) if self.plan.recall else {}
        #: The boundaries that tiles read piece by piece.
        self.strips = uncut_axes(program, self.boundaries) if self.plan.pieces > 1 else {}
        self.trains = any(v.requires_grad for v in (*self.outputs, *self.stored))
        #: The parts of maps that are read that are known to be constant; see [Note: background] in `constants`.
        self.known = {v: found for v in program.reads if (found := self.knowledge(v, frame)) is not None}
        #: True if some tiles may turn out identical: something is known of all that is read, and no operator minds
        #: where a tile lies; see [Note: identical tiles] in `tile_pass`.
        known = bool(program.reads) and len(self.known) == len(program.reads)
        self.alike = known and not self.scans and not self.strips and all(n.op.uniform for n in program.nodes)
        #: The places of identical tiles on each grid: looked for once in a step.
        self.grouped: dict[Grid, list[list[int]]] = {}

    def knowledge(self, v: Value, frame: Frame) -> Constants | None:
        """The parts of something that is read that are known to be constant, as far as the plan counts on that. A
        rehearsal assumes that something is known, so that memory is there where it is."""
        if self.place >= frame.background:
            return None
        if v in self.boundaries:
            return frame.stored[v].constants
        image, tensor = self.sources.get(v), frame.ordinary(v)
        if self.rehearsal is not None:
            return Constants(v.space.extent)
        if image is not None:
            return image.background
        return None if tensor is None else Constants.compared(v.space, tensor)

    def near(self, need: Mapping[Value, Box]) -> bool:
        """True if something that a tile reads is known to be constant in part, so that what it makes may be."""
        if self.rehearsal is not None:
            return bool(self.known)
        return any(found.near(need[key]) for key, found in self.known.items() if key in need)

    def part(self, program: Program, frame: Frame) -> SegmentRun:
        """The same run of one part of its program; see [Note: parts] in `program.program`."""
        return SegmentRun(program, frame, self.plan, self.at, self.place)

    def narrowed(self, targets: Sequence[Target]) -> SegmentRun:
        """The same run of a program that makes some of the targets; vectors, spread vectors and images are the
        run's."""
        program = self.program.narrow(targets)
        if program is self.program:
            return self
        run = copy(self)
        run.program = program
        run.stored = [t.stored for t in targets if t.stored is not None]
        run.outputs = [v for t in targets if t.stored is None for v in t.node.outputs]
        run.boundaries = [v for v in program.reads if v in self.boundaries]
        run.grouped = {}  # the tiles of a shorter program have other places
        return run

    def check_images(self) -> None:
        """Refuse to read an image again that is not the one that forward has read."""
        for v, image in self.sources.items():
            if image.changed:
                raise RecordingError(
                    f"an image of shape {v.shape} was changed in place after forward and before backward, which reads "
                    "it again. Pull back first, or give each step a tensor of its own (x.clone())."
                )

    def inputs(self, frame: Frame) -> list[Tensor]:
        """The tensors autograd has to know: vectors, spread vectors, images with grad, tokens."""
        vectors = [frame.vector(v) for v in self.program.vectors]
        spreads = [t for v in self.spreads if (t := frame.ordinary(v)) is not None]
        images = [with_requires_grad(t, True) for v in self.images if (t := self.sources[v].tensor) is not None]
        return [*vectors, *spreads, *images, *(frame.tokens[v] for v in self.boundaries)]

    def by_value(
        self, inputs: Sequence[Tensor]
    ) -> tuple[dict[Value, Tensor], dict[Value, Tensor], dict[Value, Tensor]]:
        """Vectors, spread vectors and images among the inputs, by their values."""
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
        handle: Boundary | None,
        give: Callable[[Box, Tensor], None] | None = None,
    ) -> Tensor | Pieces:
        """A tile of something that is read: a boundary, a spread vector or an image. Of a boundary that is read in
        pieces, ``give`` takes their gradients."""
        if handle is not None:
            strip = self.strips.get(v)
            return handle.read(box) if strip is None else in_pieces(handle, strip, box, self.plan.pieces, give)
        if v in spreads:
            return v.space.narrow(spreads[v], Box.whole(v.space.extent), box)
        with self.step.progress.waiting("input"):
            tile = self.sources[v].read(box)
        if self.see is not None and v.node is not None:
            self.see(v.node, tile, [box])
        return tile

    def inputs_of(self, part: SegmentRun, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of a narrowed run, given this one's."""
        vectors, spreads, _ = self.by_value(inputs)
        return [*(vectors[v] for v in part.program.vectors), *spreads.values()]

    def constants(self, v: Value, frame: Frame) -> Constants | None:
        """New cells in which a stored map may be noted as constant, where it may be and a later segment asks."""
        return Constants(v.space.extent) if self.known and self.place + 1 < frame.background else None


#: So many pieces tell a rehearsal what all need: the first, which makes sums, one that is added, and one after that.
TELLING = 3


def in_pieces(
    handle: Boundary, strip: UncutAxis, box: Box, count: int, give: Callable[[Box, Tensor], None] | None = None
) -> Pieces:
    """A box of a boundary in so many pieces; ``give`` takes the gradient of each."""
    boxes, ends = strip.boxes(box, count), tuple(end * strip.inner for end in strip.ends(count))
    if handle.home.queue.make_stand_in is not None:
        ends = ends[: TELLING + 1]

    def read(piece: int) -> Tensor:
        return handle.read(boxes[piece]).detach()

    def pull(piece: int, gradient: Tensor) -> None:
        assert give is not None
        give(boxes[piece], gradient)

    token = torch.zeros((), device=handle.device, requires_grad=give is not None)
    return Pieces(ends, read, None if give is None else pull, token)
