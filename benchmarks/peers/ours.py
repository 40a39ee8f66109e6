"""A step of ours, under a budget."""

from __future__ import annotations

import pytorch_lightning  # noqa: F401  # as a strategy's process has it, before memory is looked at
from torch import Tensor

from benchmarks.peers.networks import Headed
from benchmarks.peers.steps import Step, loss_of
from benchmarks.peers.works import VALUE, Work, tissue
from lightning_plugin import Box, LazyImage, TiledModule
from tests.lightning_plugin.background import Background


def tiled(net: Headed, image: Tensor, work: Work, budget: int) -> tuple[Step, TiledModule]:
    """The step, and the module that knows its plan. A slide knows its background, as slides of the application do."""
    module = TiledModule(net, budget=budget)
    first, last = tissue(work.side, 1 - work.background)
    slide = Background(image, Box((first, first), (last, last)), VALUE) if work.background else None

    def step() -> None:
        loss_of(module(image if slide is None else LazyImage(slide))).backward()

    return step, module
