"""The engine's errors. A message names the operator or number at fault and the way out."""

from __future__ import annotations


class EngineError(RuntimeError):
    """Base class of the engine's errors."""


class RecordingError(EngineError):
    """An operation of the user's code on a lazy tensor cannot be recorded."""


class DiskError(EngineError, OSError):
    """A map on the disk cannot be written or read."""


class SinkError(EngineError):
    """A sink cannot take a result, or a box of it."""


class PlanError(EngineError):
    """A plan does not fit the network it is used for."""


class PixelsError(PlanError):
    """A network asks for pixel values while it is recorded for planning, on an image without pixels."""


class BudgetError(EngineError):
    """No plan keeps the budget.

    Attributes:
        smallest: Smallest budget in bytes for which there is a plan. For a later call of a step of several calls it is
            an estimate: under a larger budget the calls before may hold more.
        operator: The operator that sets this budget.
    """

    def __init__(self, message: str, smallest: int = 0, operator: str = ""):
        super().__init__(message)
        self.smallest = smallest
        self.operator = operator


class BarrierError(BudgetError):
    """An operator without a tiling rule has to run whole, and its maps exceed the budget."""
