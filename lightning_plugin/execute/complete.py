"""Cotangents of which each rank has collected a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.residency.cotangent import Cotangent
from lightning_plugin.team import Team


def complete(team: Team, segment: SegmentRun, cotangents: Sequence[Cotangent]) -> None:
    """The cotangents of a segment's boundaries, of which each rank has collected its tiles' share; see [Note: team] in
    `team`."""
    program = segment.program
    places = [i for i, t in enumerate(program.targets) if t.stored is not None]
    there = team.any([c.begun for c in cotangents])
    for i, cotangent, needed in zip(places, cotangents, there, strict=True):
        if needed:
            boxes = (owned[i] for owned in program.owned(segment.backward_grid))
            for box in boxes:
                if not box.empty:
                    part = cotangent.room().read(box).clone(memory_format=torch.contiguous_format)
                    team.sum(part)
                    cotangent.room().write(box, part)
