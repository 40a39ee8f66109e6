"""A step by the means that PyTorch has itself, and by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.peers.networks import Headed
from benchmarks.peers.works import Work

#: One step: forward, loss and backward. Gradients are added to the network's own.
Step = Callable[[], object]
SEGMENTS = 5
#: Patches that gradient caching takes at a time.
CHUNK = 4


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def plain(net: Headed, image: Tensor, work: Work) -> Step:
    return lambda: loss_of(net(image)).backward()


def checkpointed(net: Headed, image: Tensor, work: Work) -> Step:
    def step() -> None:
        trunk = checkpoint_sequential(net.trunk, SEGMENTS, image, use_reentrant=False)
        loss_of(net.head(trunk)).backward()

    return step


def on_cpu(net: Headed, image: Tensor, work: Work) -> Step:
    def step() -> None:
        with torch.autograd.graph.save_on_cpu():
            out = net(image)
        loss_of(out).backward()

    return step


def cached(net: Headed, image: Tensor, work: Work) -> Step:
    """Gradient caching: features without grad, their gradients, then each chunk once more with grad."""

    def step() -> None:
        chunks = image.split(CHUNK)
        with torch.no_grad():
            features = torch.cat([net.trunk(c) for c in chunks])
        features.requires_grad_()
        loss_of(net.head(features)).backward()
        assert features.grad is not None
        for chunk, gradient in zip(chunks, features.grad.split(CHUNK), strict=True):
            net.trunk(chunk).backward(gradient)

    return step
