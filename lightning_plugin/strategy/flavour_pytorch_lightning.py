"""The strategies for ``import pytorch_lightning``."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.strategies import SingleDeviceStrategy

from lightning_plugin.strategy.single import SingleTiling


class SFTStrategy(SingleTiling, SingleDeviceStrategy):
    __doc__ = SingleTiling.__doc__


#: The strategies by name, with the options that each name stands for.
STRATEGIES: dict[str, tuple[type, dict[str, Any]]] = {"sft": (SFTStrategy, {})}
