"""The two worlds in which a `Step` is run: plain PyTorch on ordinary tensors, and the engine; its networks and images.

The plain world shares no code with the engine: it is what the engine is judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_plugin import Box, LazyImage, TiledModule, TileSource
from tests.exactness import asked
from tests.lightning_plugin.step_parts import ASKS, CONTENTS, EDITS, LAYERS, POOLS, SMALLS
from tests.lightning_plugin.steps import Image, Network, Step

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32
}  # fmt: skip


class SourceFailed(OSError):
    """What a source raises whose image cannot be read just now."""


# Networks and images -------------------------------------------------------------------------------------------------


NORMS = (nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm)


class Net(nn.Module):
    """A `Network`."""

    def __init__(self, about: Network, width: int) -> None:
        super().__init__()
        self.about = about
        self.safe = False
        channels, layers = 3, []
        for name in about.layers:
            layers.append(LAYERS[name](channels, width))
            channels = width
        self.layers = nn.Sequential(*layers)
        if about.hook:
            self.layers[0].register_forward_hook(lambda module, args, out: out * 2)
        self.seen: list[float] = []
        for place, how in about.asks:
            self.layers[place].register_forward_hook(partial(self.ask, ASKS[how]))

    def ask(self, ask: Callable[[Tensor, list[float]], Tensor | None], module: nn.Module, args: Any, y: Tensor) -> Any:
        return ask(y, self.seen)

    def forward(self, x: Tensor) -> Any:
        y = checkpoint(self.layers, x, use_reentrant=False) if self.about.inside == "checkpoint" else self.layers(x)
        return y if self.about.returns == "map" else self.after(y)

    def after(self, y: Tensor) -> list[Tensor]:
        """What becomes of the map; ``safe`` writes into copies, where the user writes into what others may need."""
        edit, (small, writes) = EDITS[self.about.edit], SMALLS[self.about.small]
        y = edit.apply(y.clone() if self.safe and edit.writes else y)
        results = [POOLS[name].apply(y) for name in self.about.pools]
        return [small(v.clone() if self.safe and writes else v) for v in results]


def networks(step: Step) -> nn.ModuleList:
    torch.manual_seed(step.seed)
    nets = nn.ModuleList(Net(about, step.width) for about in step.networks)
    for module in nets.modules():
        if isinstance(module, NORMS):  # as trained: a mean of what is normalised would be zero but for its rounding
            nn.init.normal_(module.bias, std=0.3)
    if step.whole:
        for p in nets.parameters():
            p.data = torch.randint(-1, 2, p.shape).float()
    first = nets[0].layers[0].weight
    for net in nets[1:]:
        if net.about.tied and net.layers[0].weight.shape == first.shape:
            net.layers[0].weight = first
    return nets.to(DTYPES[step.dtype])


def pixels(step: Step, i: int) -> Tensor:
    image = step.images[i]
    generator = torch.Generator().manual_seed(1000 * step.seed + i)
    return CONTENTS[image.content]((image.batch, 3, *image.side), generator).to(DTYPES[step.dtype])


class Pixels(TileSource):
    """A `TileSource` over a tensor, which fails once where it is told to."""

    def __init__(self, tensor: Tensor, fails: int | None) -> None:
        self.tensor, self.fails, self.reads = tensor, fails, 0
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, box: Box) -> Tensor:
        self.reads += 1
        if self.reads == self.fails:
            raise SourceFailed(f"the network was away at read {self.reads}")
        (top, bottom), (left, right) = box.intervals()
        return self.tensor[..., top:bottom, left:right].clone()

    def constant(self, box: Box) -> Tensor | None:
        return None


def fresh(step: Step, dtype: torch.dtype | None, jitter: float, seed: int) -> tuple[nn.ModuleList, list[Tensor]]:
    """Networks and images; in another type, with the same numbers; with parameters that are ``jitter`` off."""
    nets = networks(step)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in nets.parameters() if jitter else ():
            p.mul_((1 + jitter * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype))
    tensors = [pixels(step, i) for i in range(len(step.images))]
    if dtype is not None:
        nets, tensors = nets.to(dtype), [x.to(dtype) for x in tensors]
    tensors = [x.requires_grad_(image.kind == "leaf") for x, image in zip(tensors, step.images, strict=True)]
    return nets, tensors


# The two worlds ------------------------------------------------------------------------------------------------------


class Plain:
    """Ordinary tensors, ordinary modules. ``safe``: with a copy of whatever the step changes later, so that the number
    is known also where PyTorch refuses to compute it."""

    def __init__(self, step: Step, nets: nn.ModuleList, tensors: list[Tensor], safe: bool = False) -> None:
        self.nets, self.tensors, self.safe = nets, tensors, safe
        for net in nets:
            net.safe = safe
            for module in net.modules():
                if isinstance(module, nn.ReLU):
                    module.inplace &= not safe

    def call(self, network: int, image: int) -> Any:
        net, x = self.nets[network], self.tensors[image]
        if not self.safe:
            return called(net, net, x)
        return called(net, net, x * 1, {name: p * 1 for name, p in net.named_parameters()})


class Engine:
    """The engine's public names only."""

    def __init__(self, step: Step, nets: nn.ModuleList, tensors: list[Tensor], budget: int | None) -> None:
        self.nets, self.way = nets, step.way
        how: dict[str, Any] = {"tiles": step.way.tiles, "backward_tiles": step.way.backward_tiles}
        how = {"budget": budget} if budget else how
        self.tiled = [TiledModule(net, **how) for net in nets]
        self.engine = asked(**how)
        self.inputs = [self.input(image, x) for image, x in zip(step.images, tensors, strict=True)]

    @property
    def planned(self) -> bool:
        """Whether anything has run under a plan."""
        return any(by.plan is not None for by in (self.engine, *self.tiled))

    def input(self, image: Image, x: Tensor) -> Tensor:
        if image.kind == "source":
            return LazyImage(Pixels(x, image.fails), engine=self.engine)
        return x if self.way.calls == "tiled" else LazyImage.from_tensor(x, engine=self.engine)

    def call(self, network: int, image: int) -> Any:
        module = self.nets[network] if self.way.calls == "lazy" else self.tiled[network]
        return called(module, self.nets[network], self.inputs[image])


def called(module: nn.Module, net: Any, x: Tensor, instead: dict[str, Tensor] | None = None) -> Any:
    """The results of a call, as a user's code has them who calls ``module``; perhaps with other parameters."""
    if net.about.inside == "functional_call":
        instead = {name: 1.5 * p for name, p in (instead or dict(module.named_parameters())).items()}
    out = functional_call(module, instead, (x,)) if instead else module(x)
    return net.after(out) if net.about.returns == "map" else out
