"""Sums of the gradients of a segment's tiles, and recalled cotangents."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import accumulation_dtype, merging_dtype
from lightning_plugin.private import add_each
from lightning_plugin.program.program import Target
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.residency.tiers import Home
from lightning_plugin.team import Team

#: Most tiles whose float32 gradients are summed in float32: a sum of n equal numbers is off by up to n/2 roundings.
MAX_FLOAT32_TILES = 16


def sum_dtype(dtype: torch.dtype, device: torch.device, tiles: int) -> torch.dtype:
    """Return the type in which the gradients of a number of tiles are summed."""
    several = tiles > MAX_FLOAT32_TILES and dtype in (torch.float32, torch.complex64) and device.type != "mps"
    return merging_dtype(dtype) if several else accumulation_dtype(dtype)


def live_pairs(results: Iterable[Tensor | None], cotangents: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Pair results with their cotangents, without those that have none or need no gradient."""
    pairs = zip(results, cotangents, strict=True)
    return [(t, g) for t, g in pairs if t is not None and g is not None and t.requires_grad]


def pull_back(live: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of inputs, given results with their cotangents; None for an input without one."""
    wanted = [t for t in inputs if t.requires_grad]
    if not live or not wanted:
        return [None for _ in inputs]
    found = iter(torch.autograd.grad([t for t, _ in live], wanted, [g for _, g in live], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


class Gradients:
    """Sums of the tiles' gradients.

    Gradients of maps are added into the boxes that tiles read, halos included: into a boundary's cotangent, or into a
    tensor like the map's own.

    Attributes:
        tiles: The number of tiles.
        vectors: The vectors that need a gradient, by place.
        sum_dtypes: The types of their sums.
        vector_sums: Their sums, once there is a gradient.
        ordinary: The tensors of maps that are no boundaries.
        boundaries: The boundaries.
        map_sums: The sums of gradients of ordinary maps.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        ordinary: Mapping[Value, Tensor],
        boundaries: Mapping[Value, Boundary],
        tiles: int,
        ledger: Ledger | None,
    ) -> None:
        self.vectors = {i: t for i, t in enumerate(vectors) if t.requires_grad}
        self.sum_dtypes = {i: sum_dtype(t.dtype, t.device, tiles) for i, t in self.vectors.items()}
        self.vector_sums: dict[int, Tensor] = {}
        self.tiles = tiles
        self.ordinary = ordinary
        self.boundaries = boundaries
        self.ledger = ledger
        self.map_sums: dict[Value, Tensor] = {}

    def add_to_vectors(self, found: Sequence[Tensor | None], times: int) -> None:
        """Add a tile's gradients of the vectors, in order, each ``times`` times; existing sums in one call."""
        existing: list[tuple[Tensor, Tensor]] = []
        for i, gradient in zip(self.vectors, found, strict=True):
            if gradient is None:
                continue
            if i in self.vector_sums:
                existing.append((self.vector_sums[i], gradient))
                continue
            vector, dtype = self.vectors[i], self.sum_dtypes[i]
            if self.tiles == 1 and gradient.dtype == dtype and gradient.stride() == vector.stride():
                self.vector_sums[i] = gradient  # nothing is added to it
                continue
            # In the vector's layout: autograd would copy a gradient in another one.
            self.vector_sums[i] = torch.empty_like(vector, dtype=dtype).copy_(gradient)
            if times > 1:
                self.vector_sums[i].mul_(times)
        if existing:
            add_each([total for total, _ in existing], [gradient for _, gradient in existing], times)

    def of_vector(self, place: int) -> Tensor | None:
        """Return the gradient of the vector at a place."""
        return self.vector_sums[place].to(self.vectors[place].dtype) if place in self.vector_sums else None

    def of_map(self, v: Value, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient of an ordinary map."""
        found = self.map_sums.get(v)
        return None if found is None else found.to(dtype)

    def add_to_map(self, v: Value, box: Box, gradient: Tensor, ahead: bool) -> None:
        """Add a tile's gradient of a map that it read."""
        if v in self.boundaries:
            self.boundaries[v].cotangent.add(box, gradient, ahead)
            return
        self.allocate(v)
        whole = self.map_sums[v]
        v.space.add_into(whole, Box.whole(v.space.extent), gradient.to(whole.device), box)

    def allocate(self, v: Value) -> None:
        """Allocate the sum of a map's gradients, unless it exists."""
        if v in self.boundaries:
            self.boundaries[v].cotangent.allocate()
        elif v not in self.map_sums:
            with watched(self.ledger):
                self.map_sums[v] = self.zero_map_sum(v)

    def allocate_missing(self, maps: Iterable[Value], vectors: Iterable[int]) -> None:
        """Allocate the sums of these maps' and vectors' gradients, by place, which no tile has done."""
        for v in maps:
            self.allocate(v)
        self.vector_sums |= {i: self.zero_vector_sum(i) for i in vectors}

    def has_map(self, v: Value) -> bool:
        """True if the sum of a map's gradients exists."""
        return self.boundaries[v].cotangent.is_started if v in self.boundaries else v in self.map_sums

    def zero_vector_sum(self, place: int) -> Tensor:
        """Return a sum of a vector's gradients that is zero."""
        like = self.vectors[place]
        return torch.zeros_like(like, dtype=self.sum_dtypes[place])

    def zero_map_sum(self, v: Value) -> Tensor:
        """Return a sum of an ordinary map's gradients that is zero."""
        like = self.ordinary[v]
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros_like(like, dtype=dtype)

    def reduce_over_ranks(self, team: Team, maps: Sequence[Value]) -> None:
        """Sum the gradients of vectors and of these ordinary maps over ranks; see [Note: team] in `team`."""
        zeros = [partial(self.zero_vector_sum, i) for i in self.vectors]
        sums = team.sum_shares([self.vector_sums.get(i) for i in self.vectors], zeros)
        self.vector_sums = {i: t for i, t in zip(self.vectors, sums, strict=True) if t is not None}
        sums = team.sum_shares([self.map_sums.get(v) for v in maps], [partial(self.zero_map_sum, v) for v in maps])
        self.map_sums = {v: t for v, t in zip(maps, sums, strict=True) if t is not None}


@dataclass(frozen=True, eq=False)
class PulledReduction:
    """A reduction to pull back: its vectors, its results, and the gradients of the results."""

    target: Target
    operands: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    results: Sequence[Tensor]


class RecalledCotangent:
    """The cotangent of a map plus the cotangents of its reductions, which are recomputed for each tile that is read.

    The map's own cotangent may not exist, if the map leads to the loss by its reductions only (``is_started``).
    """

    def __init__(self, boundary: Boundary, reductions: Sequence[PulledReduction]) -> None:
        self.boundary = boundary
        self.cotangent: Cotangent = boundary.cotangent
        self.reductions = reductions
        self.is_started = self.cotangent.is_started

    @property
    def home(self) -> Home:
        return self.boundary.home

    @property
    def key(self) -> Hashable:
        """Key that is equal if reading a tile takes the same memory."""
        reductions = [(type(r.target.op), tuple(g is None for g in r.gradients)) for r in self.reductions]
        return self.is_started, self.home.tier, tuple(reductions)

    def read(self, box: Box) -> Tensor:
        share = self.reduction_share(box)
        return share + self.cotangent.read(box) if self.is_started else share

    def sum_of(self, boxes: Sequence[Box]) -> Tensor:
        """Return the sum of several tiles in which the map is equal."""
        total = self.reduction_share(boxes[0]) * len(boxes)  # a copy: the share may be an expanded tensor
        return total.add_(self.cotangent.sum_of(boxes)) if self.is_started else total

    def reduction_share(self, box: Box) -> Tensor:
        """Return the share of a tile's cotangent that comes from the reductions."""
        tile = self.boundary.read(box).detach().requires_grad_()
        live: list[tuple[Tensor, Tensor]] = []
        for r in self.reductions:
            live += live_pairs(r.target.op.pull_with_grad(box, [tile], r.operands, r.results), r.gradients)
        (share,) = pull_back(live, [tile])
        return torch.zeros_like(tile) if share is None else share

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
