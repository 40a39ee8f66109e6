"""One rule for each operator, one file for each family; `table` says how to add one."""

from lightning_plugin.rules import (
    axes,
    channels,
    contract,
    lookup,
    loss,
    norm,
    pointwise,
    positions,
    random,
    ranking,
    reduce,
    views,
    window,
)
from lightning_plugin.rules.table import API, ATEN

__all__ = [
    "API", "ATEN", "axes", "channels", "contract", "lookup", "loss", "norm", "pointwise", "positions", "random", "ranking",
    "reduce", "views", "window",
]  # fmt: skip
