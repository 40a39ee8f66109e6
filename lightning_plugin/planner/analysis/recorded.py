"""A training step of a module, recorded without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin.boxes import Box
from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.capture.run import discard_effects
from lightning_plugin.errors import PixelsError, PlanError
from lightning_plugin.graph import Rewriting, gather
from lightning_plugin.options import Chains
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.optimizers import state_for
from lightning_plugin.planner.overhead import without_gc
from lightning_plugin.private import tree_leaves, version
from lightning_plugin.source import TileSource, likely_instances


@dataclass(frozen=True)
class Blank(TileSource):
    """An image that has a shape and no pixels, for planning. Each of its images could be read alone, as of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def instances(self) -> int:  # type: ignore[override]
        return likely_instances(self.shape)

    def read(self, box: Box) -> Tensor:
        raise PixelsError(
            "this image has a shape and no pixels: it was made for planning, and the network reads a value of it while "
            "it runs. Such a step is planned in parts, each where it runs."
        )


@contextmanager
def recorded(
    module: nn.Module,
    image: Sequence[int] | Tensor,
    dtype: torch.dtype,
    splitting: Rewriting | None = None,
    optimizer: str | None = None,
    chains: Chains = "never",
    whole: bool = False,
) -> Iterator[tuple[Network, tuple[int, ...]]]:
    """A step of a module on an image as a network to be planned, split if it is to be, with the image's shape. The
    recording is gone after the block.

    With ``whole``, maps that the module returns are held whole, as `TiledModule` returns them; else their sums stand
    for the loss that is computed from them tile by tile.
    """
    if isinstance(image, LazyImage):
        lazy = LazyImage(image.source, device=image.device)
    elif isinstance(image, Tensor):
        lazy = LazyImage.from_tensor(image)
    else:
        device = next((p.device for p in module.parameters() if not p.is_meta), None)
        lazy = LazyImage(Blank(tuple(image), dtype), device=device)
    with without_gc(), unchanged(module):
        try:
            out = module(lazy)
        finally:
            discard_effects(lazy._session.root())
    leaves = [t for t in tree_leaves(out) if isinstance(t, LazyTensor)]
    if not leaves:
        raise PlanError(f"{type(module).__name__} returned nothing that depends on the image")
    wanted = [t._value if whole else scalar(t)._value for t in leaves]
    wanted = [gather(v) if v.is_map else v for v in wanted]
    recording = lazy._session.root().recording_of(wanted, splitting, chains)
    recording = recording.with_parameters(module.parameters(), lazy.device)
    owed = {} if optimizer is None else state_for(optimizer, recording.tensors)
    yield Network(recording, owed=owed), tuple(lazy.shape)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back buffers that a module writes while it is recorded (BatchNorm counts its batches). An update that some
    other recording has still to make is made first."""
    kept = [(b, version(b), b.detach().clone()) for b in module.buffers() if not b.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before, value in kept:
                if version(buffer) != before:
                    buffer.copy_(value)


def scalar(t: LazyTensor) -> LazyTensor:
    """The sum of a map, in place of the loss that is computed from it."""
    total: Any = t.sum() if t._value.is_map else t
    return total
