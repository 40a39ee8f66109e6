"""Lightning strategies: the engine under any `Trainer`.

Importing this package imports Lightning, which the engine itself does not need. The names for ``Trainer(strategy=...)``
are `lightning_plugin.registration.NAMES`.
"""

from __future__ import annotations

from lightning_plugin.registration import NAMES
from lightning_plugin.strategy.checkpoints import WholeCheckpoints
from lightning_plugin.strategy.ddp import SFTDDPStrategy
from lightning_plugin.strategy.feedback import StepMonitor
from lightning_plugin.strategy.tiling import SFTStrategy

__all__ = ["NAMES", "SFTDDPStrategy", "SFTStrategy", "StepMonitor", "WholeCheckpoints"]
