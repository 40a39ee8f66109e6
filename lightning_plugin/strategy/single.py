"""The strategy for one device."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from lightning_plugin.options import Size, StrategyWords
from lightning_plugin.strategy.bases import SingleDeviceStrategy
from lightning_plugin.strategy.tiling import Tiling


class SFTStrategy(Tiling, SingleDeviceStrategy):
    """Train on images that do not fit, on one device (CUDA, CPU, MPS), exactly::

        Trainer(strategy="sft")                       # within the memory the device has
        Trainer(strategy=SFTStrategy(budget="8GiB"))

    Without a budget and without tiles it is most of what is free on an accelerator, half of the machine's memory on a
    CPU. The options are those of `StrategyWords`.

    Args:
        tile_over: The size from which on a dense tensor of a batch is tiled; a small part of the budget if
            not given.
        parallel_devices: The device, as Lightning's Trainer sets it.
        accelerator: Lightning's accelerator.
        checkpoint_io: Lightning's checkpoint reader and writer.
        precision_plugin: Lightning's precision plugin.
    """

    strategy_name = "sft"

    def __init__(
        self,
        tile_over: Size = None,
        parallel_devices: list[torch.device] | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Unpack[StrategyWords],
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)  # type: ignore[call-arg]
        self._tile(tile_over, options)
        self.parallel_devices = parallel_devices  # type: ignore[assignment]  # the Trainer fills it in

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, in a list, as the Trainer hands it over."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ValueError(
                f"the strategy 'sft' uses one device and was given {len(devices)}. Use strategy='sft_ddp' "
                "for more than one, or devices=1."
            )
        self._devices = devices

    @property
    def root_device(self) -> torch.device:
        return self._devices[0] if self._devices else torch.device("cpu")
