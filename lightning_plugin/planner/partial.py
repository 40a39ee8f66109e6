"""Plans up to a cut, and the one that a search makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_plugin.plan import SegmentPlan

#: How many partial plans are carried on from a cut.
MOST_PARTIAL = 24


@dataclass(frozen=True)
class Partial:
    """A plan up to a cut: what it holds, what it costs, and how it got there."""

    held: int
    seconds: float
    peak: int
    spilled: frozenset[int] = frozenset()
    lower: int = 0
    extra: float = 0.0
    segment: SegmentPlan | None = None
    before: Partial | None = None

    def segments(self) -> list[SegmentPlan]:
        found: list[SegmentPlan] = []
        step: Partial | None = self
        while step is not None:
            if step.segment is not None:
                found.append(step.segment)
            step = step.before
        return found[::-1]


def undominated(plans: Sequence[Partial]) -> list[Partial]:
    """The plans that no other beats both in bytes and in seconds, thinned evenly where they are many."""
    found: list[Partial] = []
    for plan in sorted(plans, key=lambda p: (p.held, p.seconds)):
        if not found or plan.seconds < found[-1].seconds:
            found.append(plan)
    if len(found) > MOST_PARTIAL:
        step = (len(found) - 1) / (MOST_PARTIAL - 1)
        found = [found[round(i * step)] for i in range(MOST_PARTIAL)]
    return found


def most_of(pieces: Sequence[SegmentPlan]) -> SegmentPlan:
    return max(pieces, key=lambda s: s.backward_bytes)


def merged_counts(segments: Sequence[SegmentPlan]) -> list[int]:
    """How many segments each of `merge_kept`'s is made of."""
    counts: list[int] = []
    for i, s in enumerate(segments):
        if i and s.keep and segments[i - 1].keep:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts


def merge_kept(segments: Sequence[SegmentPlan]) -> list[SegmentPlan]:
    """Neighbouring kept segments are one."""
    merged: list[SegmentPlan] = []
    for s in segments:
        last = merged[-1] if merged else None
        if last is not None and last.keep and s.keep:
            merged[-1] = replace(
                last,
                targets=(*last.targets, *s.targets),
                path=f"{last.path.split(' … ')[0]} … {s.path.split(' … ')[-1]}",
                stored_bytes=last.stored_bytes + s.stored_bytes,
                forward_bytes=max(last.forward_bytes, s.forward_bytes),
                backward_bytes=max(last.backward_bytes, s.backward_bytes),
                seconds=last.seconds + s.seconds,
            )
        else:
            merged.append(s)
    return merged
