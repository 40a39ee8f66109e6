"""Random deep networks: the same random network again and again, each time added to what it was given."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin.chain import chains
from lightning_plugin.graph import Bindings, Capture, Recording
from lightning_plugin.options import Chains, Options
from lightning_plugin.plan import ChainPlan, Plan
from lightning_plugin.plans import Planner
from tests.lightning_plugin.networks import AnyPlan, Case, Draw, RandomNet, fill, grow, input_shape, plans

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Link(nn.Module):
    """A random network, back in the shape of its input, and a part of it added to that. With ``sums``, a number of each
    image goes on beside the map."""

    def __init__(self, net: RandomNet, channels: int, made: int, axes: int, sums: bool) -> None:
        super().__init__()
        self.net, self.sums = net, sums
        self.back = CONVOLUTIONS[axes - 1](made, channels, 1)

    def forward(self, x: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = self.net(x)
        y = F.interpolate(self.back(found[0]), size=x.shape[2:])
        x = x + 0.3 * torch.tanh(y)
        return x, None if total is None else torch.tanh(total + x.flatten(1).mean(1))


class Deep(nn.Module):
    """A convolution, links one after the other, and what they are read for: the last map, and of some links a mean."""

    def __init__(self, first: nn.Module, links: list[Link], read: bool) -> None:
        super().__init__()
        self.first, self.links, self.read = first, nn.ModuleList(links), read
        self.outputs = [0]

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x)
        total = x.flatten(1).mean(1) if self.links[0].sums else None
        means = []
        for link in self.links:
            x, total = link(x, total)
            if self.read:
                means.append(x.flatten(2).mean(2))
        for mean in means:
            x = x + mean.reshape(*mean.shape, *(1 for _ in x.shape[2:]))
        if total is not None:
            x = x * total.reshape(-1, *(1 for _ in x.shape[1:]))
        return [x]


class Always(Options):
    """Options by which links become chains without a budget too."""

    @property
    def chaining(self) -> Chains:
        return "always"


@dataclass(eq=False)
class AnyChain(AnyPlan):
    """Links in any segments; a share of them is kept, and there are so many slots."""

    planner: Planner = field(default_factory=lambda: Planner(Always()))
    slots: int = 0
    share: float = 0.0
    linked: int = 0
    varying: int = 0

    def choose(self, recording: Recording) -> Plan:
        plan, found = super().choose(recording), []
        for place, _, op in chains(recording.nodes):
            given = {
                v: Capture(torch.empty(v.shape, dtype=v.dtype, requires_grad=v.requires_grad), None)
                for v in (*op.body.entries, *op.body.own)
            }
            inner = super().choose(Recording(op.body.nodes, Bindings({}, given)))
            found.append(ChainPlan(place, op.count, self.slots, round(self.share * op.count), inner.segments))
            self.varying += bool(op.varying)
        self.linked += len(found)
        return replace(plan, chains=tuple(found))


@st.composite
def deep_cases(draw: Draw) -> Case:
    axes, batch = draw(st.sampled_from([1, 2, 2, 2, 3])), draw(st.integers(1, 2))
    shape = input_shape(draw, axes, batch)
    channels = draw(st.integers(1, 4))
    inside = (batch, channels, *shape[2:])
    net = grow(draw, [inside])
    with torch.no_grad():
        made = copy.deepcopy(net)(torch.zeros(inside))[0]
    assume(made.dim() == len(inside) and made.dtype == torch.float32)
    link = Link(net, channels, made.shape[1], axes, draw(st.booleans()))
    count = draw(st.integers(4, 9))
    tied = draw(st.integers(0, 5)) == 0
    links = [link] * count if tied else [copy.deepcopy(link) for _ in range(count)]
    whole = Deep(CONVOLUTIONS[axes - 1](shape[1], channels, 1), links, draw(st.integers(0, 3)) == 0)
    number = draw(st.integers(0, 1000))
    fill(whole.double(), number)
    if draw(st.integers(0, 3)) == 0:
        for p in whole.first.parameters():
            p.requires_grad_(False)
    if draw(st.integers(0, 4)) == 0:
        whole.eval()
    plan = draw(plans(3))  # the work is that of tiles times links times runs
    known = plan.__dataclass_fields__
    words = {name: getattr(plan, name) for name in known if known[name].init and name != "planner"}
    plan = AnyChain(**words, slots=draw(st.integers(0, 6)), share=draw(st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0])))
    losses = [draw(st.sampled_from(["weighted", "square", "target"]))]
    return Case(whole, [shape], [draw(st.booleans())], losses, plan, number)  # type: ignore[arg-type]
