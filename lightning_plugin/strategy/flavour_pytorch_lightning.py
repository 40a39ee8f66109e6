"""The strategies for ``import pytorch_lightning``."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_plugin.strategy.ddp import ParallelTiling
from lightning_plugin.strategy.monitor import Monitoring
from lightning_plugin.strategy.single import SingleTiling
from lightning_plugin.strategy.writing import Writing


class WholeCheckpoints(Writing, TorchCheckpointIO):
    __doc__ = Writing.__doc__


class SFTStrategy(SingleTiling, SingleDeviceStrategy):
    __doc__ = SingleTiling.__doc__
    writes = WholeCheckpoints


class SFTDDPStrategy(ParallelTiling, DDPStrategy):
    __doc__ = ParallelTiling.__doc__
    writes = WholeCheckpoints


class StepMonitor(Monitoring, Callback):
    __doc__ = Monitoring.__doc__


#: The strategies by name, with the options that each name stands for.
STRATEGIES: dict[str, tuple[type, dict[str, Any]]] = {
    "sft": (SFTStrategy, {}),
    "sft_ddp": (SFTDDPStrategy, {}),
    "sft_ddp_spawn": (SFTDDPStrategy, {"start_method": "spawn"}),
    "sft_ddp_fork": (SFTDDPStrategy, {"start_method": "fork"}),
    "sft_ddp_notebook": (SFTDDPStrategy, {"start_method": "fork"}),
}
