"""Rules of operators: one for each, in one file for each family. `table` describes how to add one."""

from lightning_plugin.rules import (  # noqa: F401  (each registers its rules)
    adaptive,
    attention,
    concat,
    contract,
    convolution,
    interpolate,
    loss,
    norm,
    picking,
    pointwise,
    pooling,
    random,
    reduce,
    slices,
    views,
)
from lightning_plugin.rules.table import API, ATEN, Recorder

__all__ = ["API", "ATEN", "Recorder"]
