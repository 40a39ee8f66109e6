"""A chain in a rehearsal: which links are run, and what stands for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_plugin.chain import Chain
from lightning_plugin.execute.frame import Step
from lightning_plugin.graph import Node, Value
from lightning_plugin.plan import ChainPlan


def rehearsed(op: Chain, plan: ChainPlan) -> list[int]:
    """The links that a rehearsal runs, of those that run again and of those that are kept: one, after which maps and
    gradients lie there, and one more."""
    again = op.count - plan.kept
    return [*range(min(2, again)), *range(max(again, op.count - 2), op.count)]


def met(node: Node, plan: ChainPlan) -> set[Value]:
    """The own vectors of the links that a rehearsal runs."""
    op = node.op
    assert isinstance(op, Chain)
    return {v for k in rehearsed(op, plan) for v in op.own(node, k)}


def spare(node: Node, plan: ChainPlan) -> set[Value]:
    """The own vectors of the links that a rehearsal leaves out."""
    op = node.op
    assert isinstance(op, Chain)
    return set(node.inputs[len(op.body.entries) :]) - met(node, plan)


class Held:
    """In a rehearsal, what the links hold that it leaves out: memory of their size, until backward has come by."""

    def __init__(self, op: Chain, plan: ChainPlan, step: Step) -> None:
        self.op, self.plan = op, plan
        ledger = step.ledger
        assert ledger is not None
        self.ledger = ledger
        self.live: list[int] = []
        again = op.count - plan.kept
        self.stored = self.room(min(plan.slots, max(0, again - 1)) * op.body.entry_bytes)
        self.kept: Tensor | None = None
        self.results = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in op.body.results]
        run = len(rehearsed(op, plan))
        self.more = self.room((op.count - run) * sum(v.bytes for v in op.body.results))

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.op.body.made[0].device)

    def keep(self, k: int, entries: Sequence[Tensor]) -> None:
        """A link begins that is kept."""
        if not self.live:
            for t in entries:
                if t.requires_grad:
                    t.register_hook(self.pulled_back)
        self.live.append(self.ledger.live)

    def rest(self, entries: Sequence[Tensor]) -> None:
        """All links have run that do: those that are kept besides hold as much as the last of them."""
        if self.live and self.plan.kept > len(self.live):
            each = self.ledger.live - self.live[-1]
            self.kept = self.room((self.plan.kept - len(self.live)) * each)

    def pulled_back(self, gradient: Tensor) -> None:
        """Backward has gone through all links that are kept."""
        self.kept = None
