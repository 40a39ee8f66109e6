"""Plans before anything runs: `make_plan`, and the cache of plans that steps share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_plugin.boxes import Box
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, ancestors
from lightning_plugin.lazy import LazyImage, LazyTensor
from lightning_plugin.plan import Plan
from lightning_plugin.planner.network import Network
from lightning_plugin.planner.rates import rates_of
from lightning_plugin.planner.choose import choose_plan
from lightning_plugin.planner.search import Lower
from lightning_plugin.units import parse_bytes


@dataclass(frozen=True)
class Blank:
    """An image of a given shape that is only planned for and never read."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def read(self, box: Box) -> Tensor:
        raise PlanError("this image has a shape and no pixels: it was made for planning")

    def constant(self, box: Box) -> Tensor | None:
        return None


def make_plan(
    module: nn.Module,
    image: Sequence[int] | Tensor,
    *,
    budget: int | str,
    device: str | None = None,
    host_budget: int | str | None = None,
    disk: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Plan:
    """The plan for one training step (or, in ``torch.no_grad``, one evaluation) of ``module`` on an image.

    ``image`` is a shape ``(N, C, *spatial)``, a tensor or a `LazyImage`. Nothing is read and no activation is
    allocated: parameters may even be on the meta device. ``device`` names the device whose rates rank the plans
    (``"cuda:a100"``, ``"cpu"``); it need not be there. What does not fit goes to the host up to ``host_budget`` where
    the device is not the CPU, then to disk where ``disk`` allows it.
    """
    if isinstance(image, LazyImage):
        lazy = LazyImage(image.source)
    elif isinstance(image, Tensor):
        lazy = LazyImage.from_tensor(image)
    else:
        lazy = LazyImage(Blank(tuple(image), dtype))
    out = module(lazy)
    leaves = [t for t in tree_leaves(out) if isinstance(t, LazyTensor)]
    if not leaves:
        raise PlanError(f"{type(module).__name__} returned nothing that depends on the image")
    values = [scalar(t)._value for t in leaves]
    kind = device or "cpu"
    lower = Lower(None if kind.split(":")[0] == "cpu" else parse_bytes(host_budget or "64GiB"), disk)
    plan = choose_plan(Network(tuple(ancestors(values))), rates_of(kind), parse_bytes(budget), lower)
    return dataclasses.replace(plan, shape=tuple(lazy.shape))


def scalar(t: LazyTensor) -> LazyTensor:
    """A map's stand-in for the loss that will be computed from it."""
    total: Any = t.sum() if t._value.is_map else t
    return total


def signature(nodes: Sequence[Node]) -> tuple[Any, ...]:
    """What two recordings have in common if and only if one's plan fits the other: structure, shapes, types."""
    place = {id(v): i for i, v in enumerate(v for n in nodes for v in n.outputs)}
    return tuple(
        (
            type(n.op).__name__,
            describe(n.op),
            tuple(place.get(id(v), -1) for v in n.inputs),
            tuple((v.shape, str(v.dtype), v.requires_grad) for v in n.outputs),
            n.inplace is not None,
        )
        for n in nodes
    )


def describe(thing: Any) -> Any:
    """A description that is equal for equal operators, without the tensors and functions' identities."""
    if isinstance(thing, Tensor) or hasattr(thing, "read"):
        return "tensor"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return (type(thing).__name__, *(describe(getattr(thing, f.name)) for f in dataclasses.fields(thing) if f.name not in ("tensor", "version", "image")))
    if isinstance(thing, dict):
        return tuple((k, describe(v)) for k, v in thing.items())
    if isinstance(thing, (list, tuple)):
        return tuple(describe(t) for t in thing)
    if callable(thing):
        return getattr(thing, "__qualname__", None) or str(thing)
    return thing if isinstance(thing, (int, float, str, bool, type(None))) else str(thing)
