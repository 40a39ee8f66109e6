"""What the exactness tests share: an engine that notes what was recorded, networks made repeatable, grids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_plugin.engine import Engine
from lightning_plugin.graph import Recording
from lightning_plugin.ops import Barrier
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.plans import Planner

#: Forward and backward grids; the forward's is never the backward's, and neither divides the odd sizes.
GRIDS = (((3, 2, 2), (2, 3, 1)), ((1, 4, 3), (5, 2, 2)))


@dataclass(eq=False)
class Noting(Engine):
    """Engine that keep the nodes' kinds and the barriers of the last run."""

    noted: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    def choose(self, recording: Recording) -> Plan:
        self.noted += [f"{n.label}: {n.op.reason}" for n in recording.nodes if isinstance(n.op, Barrier)]
        self.kinds |= {n.op.kind for n in recording.nodes}
        return super().choose(recording)


def noting(tiles: Any, backward_tiles: Any) -> Noting:
    return Noting(Planner(Options(tiles=tuple(tiles), backward_tiles=tuple(backward_tiles))))


def still(net: nn.Module) -> nn.Module:
    """Switch dropout off, whose masks depend on positions here and on the generator's state in plain PyTorch.

    Stochastic depth stays on: its small masks are drawn by the network itself, alike in both.
    """
    for module in net.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    return net
