"""Train deep networks on whole gigapixel images on one memory-constrained device, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.capture.dispatch import install_dispatch
from lightning_plugin.capture.lazy import LazyImage, materialize
from lightning_plugin.check import check
from lightning_plugin.errors import (
    BarrierError,
    BudgetError,
    EngineError,
    PixelsError,
    PlanError,
    RecordingError,
    SinkError,
)
from lightning_plugin.infer import infer
from lightning_plugin.module import TiledModule
from lightning_plugin.plan import Plan
from lightning_plugin.planner.calibrate import calibrate, calibrated
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.make import Sweep, make_plan, sweep
from lightning_plugin.registration import install_names
from lightning_plugin.rules.pointwise import elementwise
from lightning_plugin.sink import PathSink, Sink
from lightning_plugin.source import TensorSource, TileSource

if TYPE_CHECKING:
    from lightning_plugin.strategy import SFTDDPStrategy, SFTStrategy, StepMonitor, WholeCheckpoints

__all__ = [
    "BarrierError",
    "Box",
    "BudgetError",
    "EngineError",
    "Grid",
    "LazyImage",
    "PathSink",
    "PixelsError",
    "Plan",
    "PlanError",
    "Rates",
    "RecordingError",
    "SFTDDPStrategy",
    "SFTStrategy",
    "Sink",
    "SinkError",
    "StepMonitor",
    "Sweep",
    "TensorSource",
    "TileSource",
    "TiledModule",
    "WholeCheckpoints",
    "calibrate",
    "calibrated",
    "check",
    "elementwise",
    "infer",
    "make_plan",
    "materialize",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import the strategies on first use: they import Lightning, which the engine does not need."""
    if name in ("SFTStrategy", "SFTDDPStrategy", "StepMonitor", "WholeCheckpoints"):
        return getattr(import_module("lightning_plugin.strategy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install_dispatch()
install_names()
