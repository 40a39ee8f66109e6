"""What a plan is made of, for those who write it down or draw it: segments and chains in order."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_plugin.plan_fields import BarePlan, ChainPlan, SegmentPlan


@dataclass(frozen=True)
class Part:
    """A segment or a chain: what it is (``kind``, a word; ``mode``, some more), where it is in the network, how it is
    cut, what it stores where, how deep it drops that, and its figures."""

    kind: str
    mode: str
    path: str
    forward: str
    backward: str
    stored: int
    tier: str
    drop: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    recompute: float
    copied: int = 0

    @property
    def keeps(self) -> bool:
        """Whether what it stores is what autograd saves."""
        return self.kind == "kept"


def parts(plan: BarePlan) -> list[Part]:
    """The segments and chains of a plan, in order."""
    found = [(segment.targets[:1], of_segment(segment)) for segment in plan.segments]
    for chain in plan.chains:  # behind the last segment that is before it
        place = sum(targets < (chain.node,) for targets, _ in found)
        found.insert(place, ((chain.node,), of_chain(chain)))
    return [part for _, part in found]


def of_segment(s: SegmentPlan) -> Part:
    f = s.forecast
    return Part(
        kind(s),
        mode(s),
        s.path or "(nodes " + ", ".join(map(str, s.targets)) + ")",
        str(s.forward),
        str(s.backward),
        f.stored_bytes,
        s.tier,
        s.drop,
        f.forward_bytes,
        f.backward_bytes,
        f.seconds,
        f.recompute,
        f.copied_bytes,
    )


def of_chain(c: ChainPlan) -> Part:
    f = c.forecast
    tiled = [s for s in c.segments if not s.keep]
    slots = f", {c.slots} slot{'s' * (c.slots != 1)}" if c.kept < c.count else ""
    kept = f", {c.kept} kept" if c.kept else ""
    return Part(
        "chain",
        f"chain of {c.count}{slots}{kept}",
        c.path or f"(node {c.node})",
        "-" if not tiled else str(tiled[0].forward),
        "-" if not tiled else str(tiled[0].backward),
        c.slots * f.slot_bytes + c.kept * f.kept_bytes,
        "device",
        0,
        f.peak_bytes,
        f.peak_bytes,
        f.seconds,
        f.forwards / c.count,
        c.count * sum(s.forecast.copied_bytes for s in c.segments),
    )


def kind(segment: SegmentPlan) -> str:
    """How a segment runs, in a word."""
    return "kept" if segment.keep else "scanned" if segment.halo == "share" else "tiled"


def mode(segment: SegmentPlan) -> str:
    """The same, with what it does about its maps."""
    pieces = f", keys in {segment.pieces} pieces" if segment.pieces > 1 else ""
    recalled = ", recalled" if segment.recall else ""
    return kind(segment) + (" ahead" if segment.ahead else "") + pieces + dropped(segment) + recalled


def dropped(segment: SegmentPlan) -> str:
    return "" if not segment.drop else ", dropped" if segment.drop == 1 else f", dropped {segment.drop} deep"
