"""Boundaries that are let go after forward and computed again in backward.

[Note: dropped] A *dropped* boundary lives until the last segment that reads it has run forward. In backward, the first
segment that needs it has it made again: its producer's tiles run once more, without grad and without their reductions,
whose results are known. What the producer read may have been dropped too, and is then made again first. Each then stays
until the last segment in backward that reads it is done, as a stored one does: see [Note: leases] in `function`.

How deep a boundary is dropped (`SegmentPlan.drop`) says which of those made again on the way to another one stay: the
ones after which nothing is made, up to and with that other one, that is dropped less deeply. The others are let go once
more, as soon as what follows from them is there, and made again when backward has come back to them. So a run of
boundaries dropped to depth 1 between two stored ones costs one more forward of the segments that made them, whatever
its length; runs dropped to depth 2 between those of depth 1 cost two, and what is held at a time is one run of each
depth: checkpointing by divide and conquer, with as many levels as the plan has depths.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.forward import Forward
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.streams import Saved, Streams
from lightning_plugin.graph import Value
from lightning_plugin.private import Version, version, written
from lightning_plugin.progress import ranged
from lightning_plugin.residency.boundary import Boundary


@dataclass(frozen=True)
class Inputs:
    """Tensors that were used once and will be used again, and what they were; copies of streamed ones by name. A copy
    lies in other memory each time."""

    kept: Sequence[Tensor | Saved]
    versions: Sequence[Version | None]

    @staticmethod
    def of(tensors: Sequence[Tensor], streams: Streams | None) -> Inputs:
        kept = tensors if streams is None else list(map(streams.pack, tensors))
        return Inputs(
            kept, [written(t) if isinstance(k, Saved) else version(t) for t, k in zip(tensors, kept, strict=True)]
        )

    def tensors(self) -> list[Tensor]:
        """The tensors; refuses to go on where one of them was changed."""
        found = [t if isinstance(t, Tensor) else t.fetch() for t in self.kept]
        for t, before in zip(found, self.versions, strict=True):
            if before not in (version(t), written(t)):
                raise RecordingError(
                    f"a tensor of shape {tuple(t.shape)} that the forward pass used was changed in place before "
                    "backward (an optimizer step between forward and backward, say). Its old value is needed."
                )
        return found


class Recompute:
    """Makes what a segment stored a second time.

    The segment's own handles know of this, so this knows of them weakly.
    """

    def __init__(
        self, run: SegmentRun, inputs: Inputs, stored: Mapping[Value, Boundary], boundaries: Mapping[Value, Boundary]
    ) -> None:
        self.run = run
        self.depth = run.plan.drop
        self.inputs = inputs
        self.stored = {v: weakref.ref(handle) for v, handle in stored.items()}
        self.boundaries = boundaries

    def __call__(self, deepest: int) -> None:
        """Make it; of what has to come back for that, the boundaries that are dropped deeper than ``deepest`` go
        again."""
        inputs = self.inputs.tensors()
        self.run.check_images()
        there = {v: handle for v, ref in self.stored.items() if (handle := ref()) is not None}
        missing = {v: handle for v, handle in there.items() if handle.gone}
        run = self.run.narrowed([t for t in self.run.program.targets if t.stored in missing])
        passing = [handle for v in run.boundaries if (handle := self.boundaries[v]).gone]
        for handle in passing:
            handle.bring_back(deepest)
        for handle in missing.values():
            handle.make_room()
        with (
            torch.no_grad(),
            torch.autocast(run.kind, enabled=False),
            run.turn("recompute"),
            ranged("segment", run.place, run.plan.path, "recompute"),
        ):
            Forward(run, self.run.inputs_of(run, inputs), {**self.boundaries, **missing}).run()
        for handle in passing:
            if handle.recompute is not None and handle.recompute.depth > deepest:
                handle.let_go()
