"""The strategy for one device, without its Lightning base class: see `flavours`."""

from __future__ import annotations

from typing import Any

import torch

from lightning_plugin.options import Chains, Compile, Halo, HomeTier, Size, Tiles
from lightning_plugin.strategy.tiling import Tiling


class SingleTiling(Tiling):
    """Train on images that do not fit, on one device (CUDA, CPU, MPS), exactly::

        Trainer(strategy="sft")                       # within the memory the device has
        Trainer(strategy=SFTStrategy(budget="8GiB"))

    Args:
        budget: Device memory that a step may use, such as ``"8GiB"``. Without it and without ``tiles``:
            most of what is free on an accelerator, half of the machine's memory on a CPU.
        tiles: Into how many tiles to cut each spatial axis, instead of a budget.
        backward_tiles: The same for the backward pass, where it should differ.
        host_budget: Host memory for what does not fit the device.
        disk: Whether what fits neither may go to temporary files.
        halo: What neighbouring tiles do about the rows between them: both compute them ("recompute"), one hands
            them on ("share"), or "auto", which is faster. Two are approximations: with "split" the windows of the first
            operators see nothing beyond their own split of the image while a module trains, and "stochastic_split" cuts
            it at other places in each step.
        splits: Into how many splits to cut each spatial axis, where ``halo`` says that it is split.
        split_depth: Up to where: a share of the network's window operators, or the path of a module.
        wobble: How far "stochastic_split" moves each cut at most, as a part of a split's side, below 0.5.
        half: Keep maps that leave the device as bfloat16. An approximation: gradients lose digits.
        parameters: Where parameters live that do not fit the device, with their gradients and optimizer's state:
            "host", "disk", or "auto", the first of the two that has room; "device" lets none leave.
        chains: Whether long runs of equal layers are planned as one, with few maps stored at a time: "auto" in networks
            of thousands of operators, "always" or "never".
        compile: Whether tiles that come often are compiled: "never", "tiles" (`torch.compile`), or "graphs" (as CUDA
            graphs besides).
        trim: Whether the process gives freed memory back to the system where it keeps much more than a budget counts,
            on a CPU.
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
        budget: Size = None,
        tiles: Tiles = None,
        backward_tiles: Tiles = None,
        host_budget: Size = None,
        disk: bool | str = True,
        tile_over: Size = None,
        halo: Halo = "auto",
        splits: Tiles = None,
        split_depth: float | str = 0.5,
        wobble: float = 0.2,
        half: bool = False,
        parameters: HomeTier = "auto",
        chains: Chains = "auto",
        compile: Compile = "never",
        trim: bool = True,
        parallel_devices: list[torch.device] | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)  # type: ignore[call-arg]
        self._tile(
            tile_over, budget=budget, tiles=tiles, backward_tiles=backward_tiles, host_budget=host_budget, disk=disk,
            halo=halo, splits=splits, split_depth=split_depth, wobble=wobble, half=half, parameters=parameters,
            chains=chains, compile=compile, trim=trim,
        )  # fmt: skip
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


__all__ = ["SingleTiling", "Size", "Tiles"]
