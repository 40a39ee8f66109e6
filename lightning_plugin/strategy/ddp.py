"""The strategy for several devices and nodes, without its Lightning base class: see `flavour_pytorch_lightning`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from lightning_plugin.strategy.layer_sync import revert, synchronize
from lightning_plugin.strategy.resume import random_state
from lightning_plugin.strategy.settle import settle
from lightning_plugin.strategy.tiling import Tiling


class ParallelTiling(Tiling):
    """Train on images that do not fit, on several devices and nodes, exactly::

        Trainer(strategy="sft_ddp", devices=4)
        Trainer(strategy=SFTDDPStrategy(budget="8GiB"), devices=4, num_nodes=2)

    Each process has its own images, as with Lightning's DDP: gradients are averaged over processes, and with
    ``sync_batchnorm=True`` BatchNorm statistics are those of all images together, on CPUs too.

    Args:
        budget: Device memory that a step may use in each process, such as ``"8GiB"``. Without it and without
            ``tiles``: most of what is free on an accelerator, half of the machine's memory on a CPU.
        tiles: Into how many tiles to cut each spatial axis, instead of a budget.
        backward_tiles: The same for the backward pass, where it should differ.
        host_budget: Host memory for what does not fit the device.
        disk: Whether what fits neither may go to temporary files.
        tile_over: The size from which on a dense tensor of a batch is tiled; a small part of the budget if
            not given.
        find_unused_parameters: As in `torch.nn.parallel.DistributedDataParallel`.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default what suits the device.
        start_method: How processes are started: ``"popen"`` runs the script again, the others are those of
            `multiprocessing`.
        options: What else Lightning's ``DDPStrategy`` takes.
    """

    strategy_name = "sft_ddp"
    _layer_sync: Any
    lightning_module: Any

    def __init__(
        self,
        budget: int | str | None = None,
        tiles: int | Sequence[int] | None = None,
        backward_tiles: int | Sequence[int] | None = None,
        host_budget: int | str | None = None,
        disk: bool = True,
        tile_over: int | str | None = None,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **options,
        )
        self._tile(budget, tiles, backward_tiles, host_budget, disk, tile_over)
        self._forward_redirection: Any = Settling(self._forward_redirection, self)

    def setup(self, trainer: Any) -> None:
        """As Lightning's, with layers that synchronise under tiles and on any device."""
        asked, self._layer_sync = self._layer_sync, None
        if trainer.state.fn == "fit":
            synchronize(self.lightning_module, everything=asked is not None)
        super().setup(trainer)  # type: ignore[misc]
        self._layer_sync = asked

    def on_train_start(self) -> None:
        super().on_train_start()
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self.lightning_module.trainer.num_training_batches)
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks have different numbers of batches in an epoch: {', '.join(map(str, counts))}. The last "
                "ones would wait for the others for ever. Give all ranks equally many: leave "
                "use_distributed_sampler=True, or set limit_train_batches."
            )

    def teardown(self) -> None:
        asked, self._layer_sync = self._layer_sync, None  # Lightning's way back is not ours
        if self.lightning_module is not None:
            revert(self.lightning_module)
        super().teardown()
        self._layer_sync = asked

    def _random_states(self) -> list[dict[str, Any]]:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, random_state(self.root_device))  # type: ignore[attr-defined]
        return states


class Settling:
    """Lightning's way of a step through the DDP wrapper, with the step settled before the wrapper sees its result.

    The wrapper looks for the parameters that a result depends on, which a recording does not tell.
    """

    def __init__(self, redirection: Any, strategy: Any) -> None:
        self.redirection = redirection
        self.strategy = strategy

    def __call__(self, wrapper: nn.Module, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        own = vars(module).get(name)
        step = getattr(module, name)

        def settled(*args: Any, **kwargs: Any) -> Any:
            return settle(step(*args, **kwargs), self.strategy._images)

        vars(module)[name] = settled
        try:
            return self.redirection(wrapper, module, name, *args, **kwargs)
        finally:
            vars(module).pop(name)
            if own is not None:
                vars(module)[name] = own
