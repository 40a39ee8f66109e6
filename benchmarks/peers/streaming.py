"""A step of lightstream's streaming network; can be imported in lightstream's own environment only."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor, nn

from benchmarks.peers.networks import Headed
from benchmarks.peers.steps import Step, loss_of
from benchmarks.peers.works import Work


def without_init(name: str) -> None:
    """Let parts of a package be imported without its `__init__`; lightstream's asks for Lightning and torchvision."""
    spec = find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{name} is not installed in this environment")
    bare = ModuleType(name)
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = bare


without_init("lightstream")
from lightstream.core.scnn.scnn import StreamingCNN  # type: ignore[import-not-found]  # noqa: E402


def streamed(net: Headed, image: Tensor, work: Work) -> Step:
    for module in net.trunk.modules():  # its convolution's results must not be written to
        if isinstance(module, nn.ReLU):
            module.inplace = False
    shape = (1, 3, work.tile, work.tile)
    streaming = StreamingCNN(net.trunk, tile_shape=shape, copy_to_gpu=False, normalize_on_gpu=False)

    def step() -> None:
        found = streaming.forward(image).requires_grad_()
        loss_of(net.head(found)).backward()
        streaming.backward(image, found.grad)

    return step
