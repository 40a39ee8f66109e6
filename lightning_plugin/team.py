"""Ranks that compute one image together.

[Note: team] All ranks record the same network on the same image, and run it under the same plan:

- The tiles of a segment are dealt out in turn, forward and backward. Everything else (vectors, kept segments, operators
  that run whole) every rank computes for itself, with the same result.
- Forward exchanges the results of every few tiles: partial reductions, which every rank merges in the order of the
  grid, so that the result is that of one process to the bit; and tiles of boundaries, so that each rank has the whole
  boundary, on the tier of the plan.
- In backward each rank sums the gradients of its own tiles. They are then summed over ranks: the gradients of
  parameters and other vectors after a segment's last tile, the cotangent of a boundary before the backward of the
  segment that made the boundary. Operators that every rank runs for itself add to a cotangent on the first rank only.

Every gradient that leaves a segment is therefore the whole one, on every rank: averaging it over ranks, as DDP does,
does not change it. Collectives are called in the order of the segments, which is the same on all ranks.
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

#: Number of tiles of each rank between two exchanges: their partial reductions are held until then.
TILES_PER_ROUND = 16

T = TypeVar("T")


def in_memory_order(t: Tensor) -> Tensor:
    """Return a view of a tensor with its dimensions in the order in which they lie in memory: contiguous if the tensor
    is dense."""
    return t.permute(sorted(range(t.dim()), key=t.stride, reverse=True))


@dataclass(frozen=True)
class Team:
    """This process in a process group; see [Note: team]."""

    rank: int
    size: int
    device: torch.device
    group: Any = None

    @staticmethod
    def of(device: torch.device, group: Any = None) -> Team:
        """Make the team of a process group."""
        return Team(dist.get_rank(group), dist.get_world_size(group), device, group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def rounds(self, tiles: Iterable[T]) -> Iterator[list[tuple[int, T]]]:
        """Iterate over rounds: the tiles between two exchanges, each with the rank that computes it."""
        remaining = iter(tiles)
        while dealt := list(islice(remaining, TILES_PER_ROUND * self.size)):
            yield [(i % self.size, tile) for i, tile in enumerate(dealt)]

    def own_share(self, tiles: Iterable[T]) -> Iterator[T]:
        """Iterate over the tiles of this rank."""
        return islice(iter(tiles), self.rank, None, self.size)

    def all_gather(self, value: T) -> list[T]:
        """Collect a small object from every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Copy the owner's tensor to every rank, in place."""
        dist.broadcast(tensor, group=self.group, group_src=owner)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks, in place."""
        dist.all_reduce(tensor, group=self.group)

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag if any rank has set it."""
        if not flags:
            return []
        merged = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(merged, dist.ReduceOp.MAX, group=self.group)
        return [bool(f) for f in merged.tolist()]

    def sum_shares(self, shares: Sequence[Tensor | None], zeros: Sequence[Callable[[], Tensor]]) -> list[Tensor | None]:
        """Sum tensors over ranks.

        Args:
            shares: This rank's tensors; None where it has none.
            zeros: Makers of the tensors that it adds if only other ranks have one, with the strides that these have.

        Returns:
            The sums; None where no rank has a tensor.
        """
        totals: list[Tensor | None] = []
        for is_any, share, make in zip(self.any_rank([s is not None for s in shares]), shares, zeros, strict=True):
            total = share
            if is_any and (share is None or not in_memory_order(share).is_contiguous()):
                total = make() if share is None else make().add_(share)
            if total is not None:
                self.all_reduce(in_memory_order(total))  # a view: a copy of a gradient may not fit
            totals.append(total)
        return totals

    def require_equal(self, value: str, message: str) -> None:
        """Raise an error on all ranks if their values differ, before they would hang or mix two images."""
        if len(set(self.all_gather(value))) > 1:
            raise EngineError(message)
