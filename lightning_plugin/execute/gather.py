"""A boundary made one ordinary tensor, for what needs it whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.ledger import watched
from lightning_plugin.passes import first_order
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.team import Team


class GatherFunction(torch.autograd.Function):
    """A boundary as one ordinary tensor; its gradient joins the boundary's cotangent. ``team`` are the ranks that have
    all made it."""

    @staticmethod
    def forward(ctx: Any, value: Value, handle: Boundary, token: Tensor, team: Team | None) -> Tensor:
        ctx.cotangent = handle.cotangent
        ctx.whole = handle.whole
        ctx.ledger = handle.ledger
        ctx.team = team
        with watched(handle.ledger):
            out = handle.read(handle.whole)
        if not value.requires_grad:
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.team is None or ctx.team.leads:  # all ranks have this gradient, and the cotangent is summed over ranks
            with watched(ctx.ledger):
                ctx.cotangent.add(ctx.whole, grad)
        return None, None, torch.zeros((), device=grad.device), None
