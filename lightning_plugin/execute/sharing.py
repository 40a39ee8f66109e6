"""Which of identical tiles are pulled back together; see [Note: identical tiles] in `alike`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_plugin.execute.alike import Owned
from lightning_plugin.execute.recalled import Recalled
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.program.findings import Tapes
from lightning_plugin.program.program import Program
from lightning_plugin.program.scan import ScanTile
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.residency.cotangent import Cotangent

#: Identical tiles whose cotangents differ are looked through this often for others that are equal to them.
MOST_CLASSES = 4


@dataclass(frozen=True, eq=False)
class Share:
    """Identical tiles whose gradients of what they read are pulled back together: with the sum of their cotangents, to
    be given at the place of the first, or with the one that all of them have."""

    members: Sequence[Owned]
    summed: bool = False


@dataclass(eq=False)
class Tile:
    """One evaluation in backward: the tiles it stands for, and how the parts of a scan begin and go on.

    ``cotangents`` are the stored targets', where they are not simply read at the tile's own boxes. Where they are sums,
    the gradients of what is read are pulled back ``apart``, for some of the tiles at a time, or with all others and
    given ``once``. A scan's tile begins with what it was handed (``carried``) and has the cotangents of what it hands
    on (``handed_back``).
    """

    members: Sequence[Owned]
    cotangents: dict[int, Tensor] | None = None
    scan: ScanTile | None = None
    carried: dict[int, Tensor] = field(default_factory=dict)
    handed_back: dict[int, Tensor] = field(default_factory=dict)
    apart: Sequence[Share] = ()
    once: bool = False


@dataclass(frozen=True, eq=False)
class Sharing:
    """The tiles of one backward pass, by their evaluations.

    ``maps`` are the cotangents of stored targets by the serials of their nodes, ``handles`` the boundaries that are
    read; ``apart``: something that is read needs a gradient, of which each tile has its own.
    """

    run: SegmentRun
    tapes: Tapes
    maps: Mapping[int, Cotangent | Recalled]
    handles: Mapping[int, Boundary]
    apart: bool

    def parted(self, program: Program, members: Sequence[Owned]) -> Iterator[Tile]:
        """Identical tiles by what can be pulled back together; see [Note: identical tiles] in `alike`."""
        if not self.apart:
            # One backward with the sum of the cotangents. A rehearsal makes one too, so that memory is there for it.
            summing = len(members) > 1 or (self.run.alike and self.run.rehearsal is not None)
            yield Tile(members, self.summed(program, members) if summing else None)
            return
        shares = list(self.shares(program, members))
        if self.run.alike and self.run.plan.alike and (len(shares) > 1 or shares[0].summed):
            apart = shares if len(shares) > 1 else ()
            yield Tile(members, self.summed(program, members), apart=apart, once=shares[0].summed)
        else:
            yield from (Tile(share.members) for share in shares)

    def shares(self, program: Program, members: Sequence[Owned]) -> Iterator[Share]:
        """Identical tiles, those together whose gradients of what they read are pulled back together: because only
        their sum is asked for, or because their cotangents are equal; of many different ones, each by itself."""
        plan, rest = self.run.plan, list(members)
        if self.run.alike and self.run.rehearsal is not None:  # for those that are compared, or kept apart
            list(self.pairs(program, rest[0], rest[0]))
            if plan.alike:
                yield Share(rest, True)
        elif self.run.alike and plan.alike and len(rest) > 1:
            bulks = {key: handle.bulk for key, handle in self.handles.items()}
            alike: dict[Hashable, list[Owned]] = {}
            for m in rest:
                alike.setdefault(self.run.signature(self.tapes.boxes(m), bulks), []).append(m)
            rest = alike.pop(None, [])
            yield from (Share(together, True) for together in alike.values())
        for _ in range(MOST_CLASSES):
            if len(rest) < 2:
                break
            equal = [m for m in rest if self.equal(program, rest[0], m)]
            rest = [m for m in rest if m not in equal]
            yield Share(equal)
            if len(equal) == 1:  # near tissue each has its own
                break
        yield from (Share([m]) for m in rest)

    def summed(self, program: Program, members: Sequence[Owned]) -> dict[int, Tensor]:
        """The sum of the tiles' cotangents of every stored target."""
        sums: dict[int, Tensor] = {}
        for i, t in enumerate(program.targets):
            cotangent = self.maps.get(t.node.serial)
            if cotangent is not None and not members[0][i].empty:
                sums[t.node.serial] = cotangent.summed([member[i] for member in members])
        return sums

    def equal(self, program: Program, one: Owned, other: Owned) -> bool:
        """Whether two tiles have the same cotangents, to the bit."""
        return one is other or all(torch.equal(a, b) for a, b in self.pairs(program, one, other))

    def pairs(self, program: Program, one: Owned, other: Owned) -> Iterator[tuple[Tensor, Tensor]]:
        """The cotangents of two tiles, target by target. What a map's reductions add to them is the same in both."""
        for i, t in enumerate(program.targets):
            found = self.maps.get(t.node.serial)
            cotangent = found.cotangent if isinstance(found, Recalled) else found
            if cotangent is not None and cotangent.begun:
                yield cotangent.read(one[i]), cotangent.read(other[i])
