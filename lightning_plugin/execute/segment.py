"""One segment made ready: its program, its grids, and where its tensors come from.

Inputs are the tensors that a segment's operators use (parameters among them, so that each gradient reaches its
parameter once a step), and a *token* for each boundary it reads: a number that carries no data and only tells autograd
in which order segments have to run backward. `forward` evaluates tile by tile without grad. `backward` evaluates each
tile again with grad, and pulls back the tile's cotangents: its slice of each stored map's, and the same vector for each
reduction. Nothing is left of a tile when the next one begins. `function` makes one `autograd.Function` of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid, on_axis, telling
from lightning_plugin.constants import Constants
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.alike import Owned, groups, is_source, may_be_alike
from lightning_plugin.execute.frame import Frame
from lightning_plugin.execute.recalled import Recalled
from lightning_plugin.execute.rehearsal import Rehearsal
from lightning_plugin.execute.streams import as_used
from lightning_plugin.graph import Value
from lightning_plugin.ledger import Ledger
from lightning_plugin.ops import Pieces, Source
from lightning_plugin.plan import SegmentPlan
from lightning_plugin.program.findings import Tapes
from lightning_plugin.program.pieces import Strip, strips
from lightning_plugin.program.program import Program, Target
from lightning_plugin.program.recall import recallable
from lightning_plugin.program.tape import See
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.residency.tiers import Home
from lightning_plugin.team import Team

K = TypeVar("K", bound=Hashable)

#: Begins to read from lower tiers what a tile needs, given its boxes and what it owns.
Fetch = Callable[[Mapping[Value, Box], Owned], None]


class SegmentRun:
    """A program with what its segment's plan says, and where its tensors come from."""

    def __init__(self, program: Program, frame: Frame, plan: SegmentPlan, at: Home, place: int):
        self.plan = plan
        self.step = frame.step
        self.place = place
        self.backward_grid = plan.backward
        self.at = at
        self.take(program, frame)

    @property
    def ledger(self) -> Ledger | None:
        return self.step.ledger

    @property
    def see(self) -> See | None:
        """What looks at each tile of each operator, if something does."""
        return None if self.step.watch is None else self.step.watch.see

    @property
    def team(self) -> Team | None:
        return self.step.team

    def take(self, program: Program, frame: Frame) -> None:
        """Look up where a program's tensors come from.

        Backward keeps the run, and so the run keeps nothing of the frame but images: results lead, through autograd, to
        the run itself.
        """
        self.program = program
        self.stored = [t.stored for t in program.targets if t.stored is not None]
        self.spreads = [v for v in program.reads if frame.ordinary(v) is not None]
        #: The images that are read box by box. One that a kept segment has made whole is an ordinary tensor: counted
        #: here too, it would get its gradient twice.
        self.sources = {v: frame.bindings.images[v] for v in program.reads if is_source(v) and v not in frame.whole}
        self.images = [v for v, image in self.sources.items() if v.requires_grad and image.tensor is not None]
        self.boundaries = [v for v in program.reads if v in frame.stored and frame.ordinary(v) is None]
        self.outputs = [v for t in program.targets if t.stored is None for v in t.node.outputs]
        #: The reductions of the maps that backward reads back, by the serial of the node that makes each.
        self.recalls: Mapping[int, Sequence[Target]] = recallable(program) if self.plan.recall else {}
        #: The boundaries that tiles read piece by piece.
        self.strips = strips(program, self.boundaries) if self.plan.pieces > 1 else {}
        self.trains = any(v.requires_grad for v in (*self.outputs, *self.stored))
        #: Where what is read is known to be constant, if it is anywhere; see [Note: background] in `constants`.
        self.known = {v: found for v in program.reads if (found := self.knowledge(v, frame)) is not None}
        #: Whether some tiles may turn out identical; see [Note: identical tiles] in `alike`.
        self.alike = not self.scans and not self.strips and may_be_alike(program, self.known.get)
        #: The places of identical tiles on each grid: looked for once in a step.
        self.grouped: dict[Grid, list[list[int]]] = {}

    def knowledge(self, v: Value, frame: Frame) -> Constants | None:
        """Where something that is read is known to be constant, as far as the plan counts on that. A rehearsal takes it
        that something is known, so that memory is there where it is."""
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
        """Whether something that a tile reads is known to be constant in part, so that what it makes may be."""
        if self.rehearsal is not None:
            return bool(self.known)
        return any(found.near(need[key]) for key, found in self.known.items() if key in need)

    def part(self, program: Program, frame: Frame) -> SegmentRun:
        """The same run of one part of its program; see [Note: parts] in `program.parts`."""
        run = copy(self)
        run.take(program, frame)
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
        images = [as_used(t, True) for v in self.images if (t := self.sources[v].tensor) is not None]
        return [*vectors, *spreads, *images, *(frame.tokens[v] for v in self.boundaries)]

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
        with self.step.progress.spending("input"):
            tile = self.sources[v].read(box)
        if self.see is not None and v.node is not None:
            self.see(v.node, tile, [box])
        return tile

    def loop(
        self,
        tapes: Tapes,
        handle: Callable[[Value], Boundary | None],
        fetch: Fetch | None,
        planned: bool = True,
    ) -> Iterator[Sequence[Owned]]:
        """The tiles that this process evaluates, each with the tiles that are identical to it; listeners hear of those
        that were planned."""
        work = self.work(tapes, handle)
        if self.team is not None:
            work = self.team.mine(work)
        work = self.announced(tapes, work, fetch)
        return self.step.told(work) if planned and self.rehearsal is None else work

    def announced(
        self, tapes: Tapes, work: Iterator[Sequence[Owned]], fetch: Fetch | None
    ) -> Iterator[Sequence[Owned]]:
        """The same work; sources that can prefetch, and lower tiers, hear of the next tile's boxes while this one is
        computed."""
        sources = tapes.program.announced
        if not sources and fetch is None:
            yield from work
            return
        now = next(work, None)
        while now is not None:
            after = next(work, None)
            if after is not None:
                need = tapes.boxes(after[0])
                with self.watching():
                    for v in sources:
                        if v in need:
                            self.sources[v].prefetch(need[v])
                    if fetch is not None:
                        fetch(need, after[0])
            yield now
            now = after

    def fetch(
        self, handles: Mapping[Value, Boundary], cotangents: Mapping[int, Cotangent | Recalled] | None = None
    ) -> Fetch | None:
        """What begins to read a tile's part of boundaries, and of the cotangents of targets by their place; None where
        the segment does not transfer ahead."""
        if not self.plan.ahead:
            return None

        def fetch(need: Mapping[Value, Box], owned: Owned) -> None:
            for key, handle in handles.items():
                if key in need and key not in self.strips:
                    handle.fetch(need[key])
            for i, cotangent in (cotangents or {}).items():
                if not owned[i].empty:
                    cotangent.fetch(owned[i])

        return fetch

    def expect(
        self,
        outlined: Callable[[], Sequence[tuple[Mapping[Value, Box], Owned]]],
        reads: Mapping[Value, Boundary],
        targets: Mapping[int, Boundary | Cotangent | Recalled],
    ) -> None:
        """Let maps know of the largest tiles of a pass, given the boxes that tiles read and what they own; on the
        device none is moved, and nobody asks."""
        if all(kept.home.tier == "device" for kept in (*reads.values(), *targets.values())):
            return
        tiles = outlined()
        needed = largest([{**need, **self.first_pieces(need)} for need, _ in tiles])
        owned = largest([dict(enumerate(boxes)) for _, boxes in tiles])
        for v, boundary in reads.items():
            boundary.expect(needed.get(v, 0))
        for i, kept in targets.items():
            kept.expect(owned.get(i, 0))

    def first_pieces(self, need: Mapping[Value, Box]) -> dict[Value, Box]:
        """Of the boundaries that are read in pieces, the first, than which none is larger."""
        return {k: strip.boxes(need[k], self.plan.pieces)[0] for k, strip in self.strips.items() if k in need}

    def tapes(self, program: Program, grid: Grid) -> Tapes:
        """The tapes of a pass over a program's tiles."""
        compiler = self.step.compiler
        takes = compiler is not None and compiler.takes(program, self.scans)
        return Tapes(program, grid, self.step.library, compiler if takes else None, self.ledger, self.see)

    def work(self, tapes: Tapes, handle: Callable[[Value], Boundary | None]) -> Iterator[Sequence[Owned]]:
        """All tiles, each with the tiles that are identical to it."""
        program, grid = tapes.program, tapes.grid
        if self.rehearsal is None:
            tiles: Iterable[Owned] = tapes.owned()
        else:
            tiles = self.rehearsal.tiles(program, grid, self.plan.ahead or bool(program.announced))
        if not self.alike:
            return ([owned] for owned in tiles)

        def content(v: Value, box: Box) -> Hashable | None:
            found = handle(v)
            if found is None:
                return self.sources[v].holds(box) if v in self.sources else self.known[v].at(box)
            key = None if found.constants is None else found.constants.at(box)
            return key if key is not None or found.made is None else found.made.signature(box)

        tiles, known = list(tiles), self.grouped if self.rehearsal is None and program is self.program else {}
        if grid not in known:
            known[grid] = groups(tapes, tiles, content)
        return ([tiles[place] for place in places] for places in known[grid])

    def likeness(
        self, tapes: Tapes, tensors: Sequence[Tensor], where: Sequence[tuple[str, Any]], *more: Hashable
    ) -> Hashable | None:
        """Key of passes over tiles that hold the same, so that one of them is watched, or run in a rehearsal; None
        where each has to be. See [Note: watched] in `ledger`."""
        if self.ledger is None or self.scans:
            return None
        about = (
            self.watched_before(tapes, self.ledger) if self.rehearsal is None else self.rehearsal.look(tapes.program)
        )
        if about is None:
            return None
        plan = self.plan
        lie = tuple(t.stride() if t.dim() < 3 else strides_order(t) for t in tensors)
        decided = plan.tier, plan.half, plan.ahead, plan.drop > 0, plan.pieces, plan.alike
        return about, tapes.grid, decided, (self.alike, bool(self.known)), lie, tuple(where), more

    def watched_before(self, tapes: Tapes, ledger: Ledger) -> Hashable | None:
        """How images lie in memory, where a pass over the tiles holds what another on the same tapes has held; else
        None."""
        if not tapes.regular or ledger.allocator or ledger.thorough or self.alike or self.lasts:
            return None
        images = [image.tensor for image in self.sources.values()]
        return None if any(t is None for t in images) else tuple(strides_order(t) for t in images if t is not None)

    @contextmanager
    def counted(self, tapes: Tapes, likeness: Hashable | None) -> Iterator[bool]:
        """A pass over tiles, and whether what it holds is known from another one."""
        ledger = self.ledger
        passes = tapes.found.passes if self.rehearsal is None else self.rehearsal.passes
        if ledger is None or likeness is None:
            yield False
        elif likeness in passes:
            ledger.expect(passes[likeness])
            yield True
        else:
            with ledger.measured() as most:
                yield False
            passes[likeness] = most.size

    def watching(self, fresh: bool = True) -> AbstractContextManager[None]:
        """A block of a tile whose operators the ledger counts where it has to; ``fresh``: none like it was counted. See
        [Note: watched] in `ledger`."""
        if self.ledger is None or self.ledger.allocator:
            return nullcontext()
        return self.ledger.watching() if fresh or self.lasts else nullcontext()

    def watch(self, tapes: Tapes, owned: Owned) -> bool:
        """Whether a tile is to be watched, which may be the worst of its kind until now."""
        return self.ledger is not None and tapes.watch(owned, self.ledger.live)

    @property
    def lasts(self) -> bool:
        """Whether something of a tile may be there when the next begins."""
        return bool(self.plan.ahead or self.team is not None or self.program.announced)

    def turn(self, what: str) -> AbstractContextManager[None]:
        """A block in which it is this segment's turn to do ``what``."""
        return nullcontext() if self.ledger is None else self.ledger.during((self.place, what))

    @property
    def scans(self) -> bool:
        """Whether tiles hand rows on, one after the other."""
        return self.plan.halo == "share"

    @property
    def rehearsal(self) -> Rehearsal | None:
        """What the run is, if it is only a rehearsal."""
        return self.step.rehearsal

    @property
    def kind(self) -> str:
        """The device type the segment runs on."""
        for t in self.program.targets:
            kind = t.map.device.type
            return kind if torch.amp.is_autocast_available(kind) else "cpu"
        return "cpu"

    def constants(self, v: Value, frame: Frame) -> Constants | None:
        """New cells in which a stored map may be noted as constant, where it may be and a later segment asks."""
        return Constants(v.space.extent) if self.known and self.place + 1 < frame.background else None


def outline(program: Program, grid: Grid) -> list[tuple[Mapping[Value, Box], Owned]]:
    """Tiles among which are those of the longest boxes on every axis, each with all its boxes: what a box is on one
    axis depends on nothing but the tile's index there."""
    ends = program.ends(grid)
    axes = len(grid.counts)
    indices = {on_axis(i, axis, axes) for axis, count in enumerate(grid.counts) for i in telling(count)}
    tiles = [grid.owned(ends, index) for index in sorted(indices)]
    return [(program.boxes(owned), owned) for owned in tiles]


def largest(tiles: Sequence[Mapping[K, Box]]) -> dict[K, int]:
    """The positions of each map's largest tile, given some that are the longest on every axis."""
    extents: dict[K, list[tuple[int, ...]]] = {}
    for boxes in tiles:
        for key, box in boxes.items():
            extents.setdefault(key, []).append(box.extent)
    return {key: math.prod(map(max, zip(*found, strict=True))) for key, found in extents.items()}


def strides_order(t: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as they lie in memory, from the outermost."""
    return tuple(sorted(range(t.dim()), key=t.stride, reverse=True))


def read_from(v: Value, handle: Boundary | None) -> tuple[str, Any]:
    """Where a pass over tiles reads a map from."""
    if handle is not None:
        return handle.home.tier, handle.half
    op = v.node.op if v.node is not None else None
    return (op.lies, (op.prefetches, op.together)) if isinstance(op, Source) else ("here", None)


#: So many pieces tell a rehearsal what all need: the first, which makes sums, one that is added, and one after that.
TELLING = 3


def in_pieces(
    handle: Boundary, strip: Strip, box: Box, count: int, give: Callable[[Box, Tensor], None] | None = None
) -> Pieces:
    """A box of a boundary in so many pieces; ``give`` takes the gradient of each."""
    boxes, ends = strip.boxes(box, count), tuple(end * strip.inner for end in strip.ends(count))
    if handle.home.queue.stand is not None:
        ends = ends[: TELLING + 1]

    def read(piece: int) -> Tensor:
        return handle.read(boxes[piece]).detach()

    def pull(piece: int, gradient: Tensor) -> None:
        assert give is not None
        give(boxes[piece], gradient)

    token = torch.zeros((), device=handle.device, requires_grad=give is not None)
    return Pieces(ends, read, None if give is None else pull, token)
