"""Ranks that compute one image together.

[Note: team] All ranks record the same network on the same image, and run it under the same plan. What they do with it:

- The tiles of a segment are dealt out in turn, forward and backward. All else (vectors, kept segments, what needs a map
  whole) every rank computes for itself, and gets the same.
- After every few tiles, forward exchanges what they made: shares of reductions, which every rank merges in the order of
  the grid, so that the result is that of one process to the bit; and tiles of boundaries, so that each rank has the
  whole boundary, on the tier that the plan says.
- In backward, each rank collects its own tiles' share of every gradient. A segment sums over ranks what it gives back:
  gradients of parameters and other vectors when its tiles are done, a boundary's cotangent when the segment that made
  the boundary needs it. What every rank computes for itself adds to a cotangent on the first rank only.

So every gradient that leaves a segment is the whole one, on every rank: averaging it over ranks, as DDP does, leaves
it as it is. All collectives happen in the order of the segments, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_plugin.errors import EngineError

#: Number of tiles that each rank computes between two exchanges: their shares of reductions are held until then.
ROUND = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """This process among those of a group; see [Note: team]."""

    rank: int
    size: int
    device: torch.device
    group: Any = None

    @staticmethod
    def of(device: torch.device, group: Any = None) -> Team:
        """The team of all processes in a group."""
        return Team(dist.get_rank(group), dist.get_world_size(group), device, group)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def rounds(self, work: Iterable[T]) -> Iterator[list[tuple[int, T]]]:
        """Pieces of work, each with the rank that does it, as many as are done between two exchanges."""
        pieces = iter(work)
        while dealt := list(islice(pieces, ROUND * self.size)):
            yield [(i % self.size, piece) for i, piece in enumerate(dealt)]

    def mine(self, work: Iterable[T]) -> Iterator[T]:
        """This rank's part of some work."""
        return islice(iter(work), self.rank, None, self.size)

    def gather(self, thing: T) -> list[T]:
        """A small object of every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing, group=self.group)
        return found

    def send(self, tensor: Tensor, owner: int) -> None:
        """Give every rank the owner's tensor."""
        dist.broadcast(tensor, group=self.group, group_src=owner)

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over ranks, in place."""
        dist.all_reduce(tensor, group=self.group)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has it set."""
        if not flags:
            return []
        found = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [bool(f) for f in found.tolist()]

    def totals(self, shares: Sequence[Tensor | None], blank: Sequence[Callable[[], Tensor]]) -> list[Tensor | None]:
        """Each rank's shares added up; a rank without one adds a ``blank``. None where no rank has any."""
        found: list[Tensor | None] = []
        for there, share, make in zip(self.any([s is not None for s in shares]), shares, blank, strict=True):
            total = make() if there and share is None else share
            if total is not None:
                total = total.contiguous()
                self.sum(total)
            found.append(total)
        return found

    def agree(self, mine: str, what: str) -> None:
        """Stop all ranks where they differ, before they wait for each other for ever or mix two images."""
        if len(set(self.gather(mine))) > 1:
            raise EngineError(what)
