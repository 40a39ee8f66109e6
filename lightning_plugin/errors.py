"""The engine's errors. Each names the operator or number at fault and the way out."""

from __future__ import annotations


class EngineError(RuntimeError):
    """Anything the engine refuses to do."""


class RecordingError(EngineError):
    """The user's code did something with a lazy tensor that cannot be recorded."""


class DiskError(EngineError, OSError):
    """A map on the disk cannot be written or read."""


class PlanError(EngineError):
    """A plan does not fit the network it is used for."""


class PixelsError(PlanError):
    """A network reads values while it is recorded for planning, on an image without pixels."""


class BudgetError(EngineError):
    """No plan keeps the budget.

    ``smallest`` is the smallest budget in bytes for which there is one, ``operator`` the operator that sets it. In the
    middle of a step of several calls it is what would be enough beside what the step holds then: with a larger budget
    the calls before may take more.
    """

    def __init__(self, message: str, smallest: int = 0, operator: str = ""):
        super().__init__(message)
        self.smallest = smallest
        self.operator = operator


class BarrierError(BudgetError):
    """An operator without a tiling rule has to run whole, and the budget does not hold its maps."""
