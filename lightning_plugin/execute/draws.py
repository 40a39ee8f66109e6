"""Random numbers that PyTorch's generator gives while a link runs: they are the same when it runs again.

What draws by positions has a key, and needs nothing. But masks of one number for each channel, or dropout on a vector,
are drawn by PyTorch: before a link's first run the state of the generators is looked at, and kept if the run has moved
it. Whenever the link runs again, it begins from there, and leaves the generators as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_plugin.chain import Body
from lightning_plugin.ops import Barrier, VectorOp


@dataclass(eq=False)
class Draws:
    """The states that generators had before the links that have drawn; ``devices`` are those beside the CPU's."""

    looks: bool
    devices: tuple[torch.device, ...]
    states: dict[int, list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(body: Body) -> Draws:
        """Nothing is looked at where nothing can draw."""
        looks = any(isinstance(n.op, (VectorOp, Barrier)) for n in body.nodes)
        return Draws(looks, tuple({v.device for v in body.made if v.device.type == "cuda"}))

    @contextmanager
    def first(self, k: int) -> Iterator[None]:
        """A block in which a link runs for the first time."""
        before = self.state() if self.looks else []
        yield
        if any(not torch.equal(a, b) for a, b in zip(before, self.state() if self.looks else [], strict=True)):
            self.states[k] = before

    @contextmanager
    def again(self, k: int) -> Iterator[None]:
        """A block in which it runs again."""
        if k not in self.states:
            yield
            return
        now = self.state()
        self.set(self.states[k])
        try:
            yield
        finally:
            self.set(now)

    def state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.devices)]

    def set(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for device, each in zip(self.devices, state[1:], strict=True):
            torch.cuda.set_rng_state(each, device)
