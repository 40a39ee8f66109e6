"""The cotangent of a recalled map, with what the map's reductions add to it; see [Note: recall] in `program.recall`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.program.program import Target
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.residency.tiers import Home


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
        self.begun = self.cotangent.begun

    @property
    def home(self) -> Home:
        return self.boundary.home

    def read(self, box: Box) -> Tensor:
        share = self.share(box)
        return share + self.cotangent.read(box) if self.begun else share

    def summed(self, boxes: Sequence[Box]) -> Tensor:
        """The sum of several tiles', in which the map is the same."""
        total = self.share(boxes[0]) * len(boxes)  # which may lie in one place for all positions
        return total.add_(self.cotangent.summed(boxes)) if self.begun else total

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

    def fetch(self, box: Box) -> None:
        self.boundary.fetch(box)
        self.cotangent.fetch(box)

    def expect(self, largest: int) -> None:
        self.boundary.expect(largest)

    def rest(self) -> None:
        self.boundary.rest()
        self.cotangent.rest()

    def clear(self) -> None:
        self.cotangent.clear()


def recalled_key(cotangent: Cotangent | Recalled | None) -> Hashable:
    """Equal for cotangents whose tiles take the same memory to be read."""
    if not isinstance(cotangent, Recalled):
        return None
    reductions = [(type(r.target.op), tuple(g is None for g in r.gradients)) for r in cotangent.reductions]
    return cotangent.begun, cotangent.home.tier, tuple(reductions)
