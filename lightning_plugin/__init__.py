"""Train deep networks on whole gigapixel images on one memory-constrained device, exactly."""

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.check import check
from lightning_plugin.errors import BarrierError, BudgetError, EngineError, PlanError, RecordingError
from lightning_plugin.lazy import LazyImage, materialize
from lightning_plugin.module import TiledModule
from lightning_plugin.plan import Plan
from lightning_plugin.planner.make import make_plan
from lightning_plugin.source import TensorSource, TileSource

__all__ = [
    "BarrierError",
    "Box",
    "BudgetError",
    "EngineError",
    "Grid",
    "LazyImage",
    "Plan",
    "PlanError",
    "RecordingError",
    "TensorSource",
    "TileSource",
    "TiledModule",
    "check",
    "make_plan",
    "materialize",
]
