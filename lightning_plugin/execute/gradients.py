"""Cotangents that a segment's backward reads, and sums of the gradients that its tiles find."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.private import add_each
from lightning_plugin.program.program import Target
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.residency.tiers import Home
from lightning_plugin.team import Team

#: Over so many tiles, float32 numbers may be added up in float32: a sum of n equal ones is off by half of n roundings.
FEW = 16


def type_of_sum(dtype: torch.dtype, device: torch.device, tiles: int) -> torch.dtype:
    """The type in which gradients of so many tiles are added up."""
    several = tiles > FEW and dtype == torch.float32 and device.type != "mps"
    return torch.float64 if several else accumulation_dtype(dtype)


class Gradients:
    """Gradients of vectors are summed over tiles. Those of maps are scatter-added, halo and all, to where a map
    lives: to a boundary's cotangent, or to a tensor like the one that the map lies in (``ordinary``)."""

    def __init__(
        self,
        vectors: Sequence[Tensor],
        ordinary: Mapping[Value, Tensor],
        handles: Mapping[Value, Boundary],
        tiles: int,
        ledger: Ledger | None,
    ) -> None:
        #: The vectors that need a gradient, the types in which these are added up, and the sums, by place.
        self.vectors = {i: t for i, t in enumerate(vectors) if t.requires_grad}
        self.types = {i: type_of_sum(t.dtype, t.device, tiles) for i, t in self.vectors.items()}
        self.sums: dict[int, Tensor] = {}
        self.ordinary = ordinary
        self.handles = handles
        self.ledger = ledger
        self.wholes: dict[Value, Tensor] = {}

    def add(self, found: Sequence[Tensor | None], times: int) -> None:
        """A tile's gradients of the vectors that need one, in order; sums that have begun go on in one call."""
        begun: list[tuple[Tensor, Tensor]] = []
        for i, gradient in zip(self.vectors, found, strict=True):
            if gradient is None:
                continue
            if i in self.sums:
                begun.append((self.sums[i], gradient))
                continue
            # In the tensor's own layout: autograd would make a copy of any other.
            self.sums[i] = torch.empty_like(self.vectors[i], dtype=self.types[i]).copy_(gradient)
            if times > 1:
                self.sums[i].mul_(times)
        if begun:
            add_each([total for total, _ in begun], [gradient for _, gradient in begun], times)

    def vector(self, place: int) -> Tensor | None:
        """The gradient of a vector by its place."""
        return self.sums[place].to(self.vectors[place].dtype) if place in self.sums else None

    def whole(self, v: Value, dtype: torch.dtype) -> Tensor | None:
        """The gradient of a map that lies in a tensor."""
        found = self.wholes.get(v)
        return None if found is None else found.to(dtype)

    def give(self, v: Value, box: Box, gradient: Tensor, ahead: bool) -> None:
        """A tile's gradient of something that it read."""
        if v in self.handles:
            self.handles[v].cotangent.add(box, gradient, ahead)
            return
        self.room_for(v)
        whole = self.wholes[v]
        v.space.add_into(whole, Box.whole(v.space.extent), gradient.to(whole.device), box)

    def room_for(self, v: Value) -> None:
        """Room for the gradient of a map, unless it is there."""
        if v in self.handles:
            self.handles[v].cotangent.allocate()
        elif v not in self.wholes:
            with watched(self.ledger):
                self.wholes[v] = self.zeros(v)

    def blank(self, maps: Iterable[Value]) -> None:
        """Room for the gradients of these maps and of all vectors, as tiles would have made it."""
        for v in maps:
            self.room_for(v)
        self.sums = {i: self.nothing(i) for i in self.vectors}

    def nothing(self, place: int) -> Tensor:
        """The sum of no gradients of a vector."""
        return torch.zeros_like(self.vectors[place], dtype=self.types[place], memory_format=torch.contiguous_format)

    def zeros(self, v: Value) -> Tensor:
        """Room for the gradient of a map that lies in a tensor."""
        like = self.ordinary[v]
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    def together(self, team: Team, maps: Sequence[Value]) -> None:
        """Gradients of vectors and of these maps that lie in tensors, of which each rank has computed its tiles' share;
        see [Note: team] in `team`."""
        nothings = [partial(self.nothing, i) for i in self.vectors]
        sums = team.sum_shares([self.sums.get(i) for i in self.vectors], nothings)
        self.sums = {i: t for i, t in zip(self.vectors, sums, strict=True) if t is not None}
        wholes = team.sum_shares([self.wholes.get(v) for v in maps], [partial(self.zeros, v) for v in maps])
        self.wholes = {v: t for v, t in zip(maps, wholes, strict=True) if t is not None}


@dataclass(frozen=True, eq=False)
class Pulled:
    """A reduction with the vectors that it uses, the gradients of its results and these."""

    target: Target
    operands: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    results: Sequence[Tensor]


class Recalled:
    """In place of a map's cotangent: a tile that is read is the cotangent's and the reductions' share of it. There may
    be nothing of the former, where nobody but the reductions leads to a loss."""

    def __init__(self, boundary: Boundary, reductions: Sequence[Pulled]) -> None:
        self.boundary = boundary
        self.cotangent: Cotangent = boundary.cotangent
        self.reductions = reductions
        self.is_started = self.cotangent.is_started

    @property
    def home(self) -> Home:
        return self.boundary.home

    @property
    def key(self) -> Hashable:
        """Equal where tiles take the same memory to be read."""
        reductions = [(type(r.target.op), tuple(g is None for g in r.gradients)) for r in self.reductions]
        return self.is_started, self.home.tier, tuple(reductions)

    def read(self, box: Box) -> Tensor:
        share = self.share(box)
        return share + self.cotangent.read(box) if self.is_started else share

    def sum_of(self, boxes: Sequence[Box]) -> Tensor:
        """The sum of several tiles', in which the map is the same."""
        total = self.share(boxes[0]) * len(boxes)  # which may lie in one place for all positions
        return total.add_(self.cotangent.sum_of(boxes)) if self.is_started else total

    def share(self, box: Box) -> Tensor:
        """The reductions' share of the cotangent of a tile."""
        tile = self.boundary.read(box).detach().requires_grad_()
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []
        for r in self.reductions:
            made = r.target.op.pulled(box, [tile], r.operands, r.results)
            for value, gradient in zip(made, r.gradients, strict=True):
                if value is not None and gradient is not None and value.requires_grad:
                    outputs.append(value)
                    cotangents.append(gradient)
        if not outputs:
            return torch.zeros_like(tile)
        return torch.autograd.grad(outputs, [tile], cotangents)[0]

    def prefetch(self, box: Box) -> None:
        self.boundary.prefetch(box)
        self.cotangent.prefetch(box)

    def set_largest_tile(self, largest: int) -> None:
        self.boundary.set_largest_tile(largest)

    def wait(self) -> None:
        self.boundary.wait()
        self.cotangent.wait()

    def clear(self) -> None:
        self.cotangent.clear()
