"""Giving memory to a module that was made on the meta device, below the device on which it will be trained.

A network that is too large for the host is made without data (``with torch.device("meta")``). Its parameters then get
memory where they are to live, one module after the other, and their values from a checkpoint or from the module itself:
never more than one is held anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_plugin.errors import EngineError
from lightning_plugin.private import version
from lightning_plugin.residency.homes import Homes

Initialize = Callable[[nn.Module], None]


@torch.no_grad()
def build(
    module: nn.Module,
    homes: Homes,
    tier: str,
    weights: Mapping[str, Tensor] | None = None,
    initialize: Initialize | None = None,
) -> None:
    """Give all parameters of a module that have no data a home on a tier, and all such buffers memory.

    Values come from ``weights``, by name, else from ``initialize``, which is called with each module whose own tensors
    are there now, else from the module's own ``reset_parameters``. What is tied stays tied.
    """
    made: dict[int, Tensor] = {}
    filled: set[int] = set()  # what is tied is filled once
    for path, part in module.named_modules():
        here = list(own(part, path))
        if not here:
            continue
        for tensors, name, key in here:
            old = tensors[name]
            assert old is not None
            if id(old) not in made:
                made[id(old)] = on_tier(old, homes, tier)
            tensors[name] = new = made[id(old)]
            if weights is not None:
                if key not in weights:
                    raise EngineError(
                        f"the weights have nothing for {key!r}, which has no data yet. Give weights with all names of "
                        "the module's state_dict, or none and a way to initialize each module."
                    )
                if id(new) not in filled:
                    new.copy_(weights[key])
            filled.add(id(new))
        if weights is None:
            before = [(key, tensors[name], version(tensors[name])) for tensors, name, key in here]  # type: ignore[arg-type]
            (initialize or reset)(part)
            for key, tensor, was in before:
                if version(tensor) == was:  # type: ignore[arg-type]
                    raise EngineError(
                        f"{key!r} had no data, and nothing has filled it: {type(part).__name__} does not. "
                        "Give weights, or initialize=<a function that fills the tensors of one module>."
                    )
        homes.rest()


def own(part: nn.Module, path: str) -> Iterator[tuple[dict[str, Tensor | None], str, str]]:
    """The tensors without data that a module has itself: where they are kept, and their full names."""
    prefix = f"{path}." if path else ""
    for tensors in (part._parameters, part._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None and tensor.is_meta:
                yield tensors, name, prefix + name  # type: ignore[misc]


def on_tier(old: Tensor, homes: Homes, tier: str) -> Tensor:
    """A tensor like one without data: a parameter with a home, a buffer in ordinary memory."""
    if not isinstance(old, nn.Parameter):
        return torch.empty_like(old, device="cpu")
    cpu = torch.device("cpu")
    new = nn.Parameter(homes.room(old, tier, cpu), requires_grad=old.requires_grad)
    homes.settle(new, tier, cpu)
    return new


def reset(part: nn.Module) -> None:
    """Have a module give its own tensors the values that it starts with."""
    ways = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if ways is None:
        raise EngineError(
            f"{type(part).__name__} has parameters without data and no reset_parameters(). Give weights, or "
            "initialize=<a function that fills the tensors of one module>."
        )
    ways()
