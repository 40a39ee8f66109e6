"""Lightning strategies: the engine under any `Trainer`.

Importing this package imports Lightning, which the engine itself does not need, and registers the names in `NAMES` for
``Trainer(strategy=...)``.
"""

from __future__ import annotations

from typing import Any

from lightning_plugin.strategy.bases import StrategyRegistry
from lightning_plugin.strategy.checkpoints import WholeCheckpoints
from lightning_plugin.strategy.ddp import SFTDDPStrategy
from lightning_plugin.strategy.feedback import StepMonitor
from lightning_plugin.strategy.tiling import SFTStrategy

__all__ = ["NAMES", "SFTDDPStrategy", "SFTStrategy", "StepMonitor", "WholeCheckpoints"]

#: Registered names: the strategy class of each, and its preset options.
NAMES: dict[str, tuple[type, dict[str, Any]]] = {
    "sft": (SFTStrategy, {}),
    "sft_ddp": (SFTDDPStrategy, {}),
    "sft_ddp_spawn": (SFTDDPStrategy, {"start_method": "spawn"}),
    "sft_ddp_fork": (SFTDDPStrategy, {"start_method": "fork"}),
    "sft_ddp_notebook": (SFTDDPStrategy, {"start_method": "fork"}),
}

for _name, (_strategy, _options) in NAMES.items():
    StrategyRegistry.register(_name, _strategy, description=f"{_strategy.__name__} of lightning_plugin", **_options)
