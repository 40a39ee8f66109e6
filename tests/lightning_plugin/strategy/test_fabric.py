"""`Fabric` needs no strategy of this package: a `TiledModule` is a module like any other."""

from __future__ import annotations

import copy

import torch
from lightning_fabric import Fabric
from torch import nn

from lightning_plugin import TiledModule
from tests.exactness import difference
from tests.lightning_plugin.strategy.modules import Backbone, Pictures


def train(net: nn.Module) -> list[float]:
    """The losses of a loop as Fabric's users write it."""
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    losses = []
    for image, label in zip(Pictures(4).images, Pictures(4).labels, strict=True):
        loss = nn.functional.cross_entropy(model(image[None]), label[None])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_loop_of_fabric() -> None:
    torch.manual_seed(0)
    plain = Backbone()
    tiled = TiledModule(copy.deepcopy(plain), tiles=(3, 2))
    expected, actual = train(plain), train(tiled)
    assert tiled.plan is not None and any(s.forward.tiles > 1 for s in tiled.plan.segments)
    assert difference(torch.tensor(actual), torch.tensor(expected)) < 1e-9
    for mine, other in zip(tiled.parameters(), plain.parameters(), strict=True):
        assert difference(mine, other, 1e-3) < 1e-9
