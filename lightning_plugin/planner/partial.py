"""Plans up to a cut, and the one that a search makes of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_plugin.plan import SegmentPlan

#: How many partial plans are carried on from a cut,
MOST_PARTIAL = 24
#: and how many besides that hold dropped maps, which they will be rid of.
MOST_OPEN = 6


@dataclass(frozen=True)
class Dropped:
    """What a segment stores and drops: the maps and their bytes, the bytes of the tiles that make them again, and the
    maps that it reads to do so."""

    maps: frozenset[int]
    size: int
    tiles: int
    reads: frozenset[int]


def still_needed(dropped: Sequence[Dropped], maps: Collection[int]) -> tuple[Dropped, ...]:
    """Of what was dropped in this order, what some maps are among, and what it takes to make that again."""
    found: list[Dropped] = []
    for d in reversed(dropped):
        if not d.maps.isdisjoint(maps) or any(not f.reads.isdisjoint(d.maps) for f in found):
            found.append(d)
    return tuple(reversed(found))


@dataclass(frozen=True)
class Partial:
    """A plan up to a cut: what it holds, what it costs, and how it got there.

    What it holds is what it will hold when backward is back at the cut: dropped maps count until no later segment makes
    them come back.
    """

    held: int
    seconds: float
    peak: int
    spilled: frozenset[int] = frozenset()
    lower: int = 0
    extra: float = 0.0
    segment: SegmentPlan | None = None
    before: Partial | None = None
    dropped: tuple[Dropped, ...] = ()

    @property
    def after(self) -> int:
        """What it holds where what it dropped does not have to come back any more."""
        return self.held - sum(d.size for d in self.dropped)

    def at(self, alive: Collection[int]) -> Partial:
        """The same where these maps are alive: what else was dropped is held no longer."""
        if not self.dropped:
            return self
        dropped = still_needed(self.dropped, alive)
        return replace(self, held=self.after + sum(d.size for d in dropped), dropped=dropped)

    def segments(self) -> list[SegmentPlan]:
        found: list[SegmentPlan] = []
        step: Partial | None = self
        while step is not None:
            if step.segment is not None:
                found.append(step.segment)
            step = step.before
        return found[::-1]


def undominated(plans: Sequence[Partial]) -> list[Partial]:
    """The plans that no other beats in bytes, now and later, and in seconds, thinned evenly where they are many."""
    closed: list[Partial] = []
    for plan in sorted((p for p in plans if not p.dropped), key=lambda p: (p.held, p.seconds)):
        if not closed or plan.seconds < closed[-1].seconds:
            closed.append(plan)
    opened: list[Partial] = []
    for plan in sorted((p for p in plans if p.dropped), key=lambda p: (p.seconds, p.held, p.after)):
        rivals = (r for r in (*opened, *closed) if r.seconds <= plan.seconds)
        if not any(r.held <= plan.held and r.after <= plan.after for r in rivals):
            opened.append(plan)
    return [*thinned(closed, MOST_PARTIAL), *thinned(opened, MOST_OPEN)]


def thinned(plans: list[Partial], most: int) -> list[Partial]:
    if len(plans) <= most:
        return plans
    step = (len(plans) - 1) / (most - 1)
    return [plans[round(i * step)] for i in range(most)]


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
