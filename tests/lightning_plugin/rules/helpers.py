"""Helpers of the tests of rules: a function behind a convolution, and what was recorded for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage
from lightning_plugin.graph import ancestors
from lightning_plugin.ops import Op
from lightning_plugin.rules.uncut import Flatten
from tests.exactness import assert_exact, flat


class After(nn.Module):
    """A function of what a small convolution makes, so that gradients across seams are tested with it.

    ``parameters`` (name to shape) are handed to the function by name.
    """

    def __init__(self, function: Callable[..., Any], channels: int = 4, axes: int = 2, **parameters: Any):
        super().__init__()
        self.function = function
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](3, channels, 3, padding=1)
        self.names = list(parameters)
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(x), **{name: getattr(self, name) for name in self.names})


def recorded_kinds(
    net: Callable[[Tensor], Any], shape: Sequence[int], dtype: torch.dtype = torch.float64
) -> Counter[str]:
    """Counts of each class of operator recorded for a network; nothing is executed."""
    out = net(LazyImage.from_tensor(torch.empty(tuple(shape), dtype=dtype)))
    values = [t._value for t in flat(out) if hasattr(t, "_value")]  # type: ignore[attr-defined]
    return Counter(name_of(node.op) for node in ancestors(values))


def name_of(op: Op) -> str:
    """The class of an operator; one that puts an axis and plain factors together joins no axes."""
    return "Blocks" if isinstance(op, Flatten) and not op.axes else type(op).__name__


def assert_tiled(net: nn.Module, shape: Sequence[int], *, joins: bool | None = False, **how: Any) -> None:
    """Exact, and nothing in it is run whole; every axis stays as it is, unless axes have to be joined or one uncut
    (``joins``; None: perhaps).

    A rule that declines what it knows would go unnoticed otherwise: what is left to a barrier is exact too.
    """
    assert_exact(net, shape, **how)
    kinds = recorded_kinds(net, shape)
    assert not kinds["Barrier"] and not kinds["Gather"], f"run whole: {kinds}"
    joined = bool(kinds["Uncut"] or kinds["Flatten"])
    assert joins is None or joined == joins, f"axes that a tile cannot cut: {kinds}"
