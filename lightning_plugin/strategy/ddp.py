"""The strategy for several devices and nodes, without its Lightning base class: see `flavour_pytorch_lightning`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_plugin.options import Chains, Compile, Halo, Size, Tiles
from lightning_plugin.strategy.layer_sync import revert, synchronize
from lightning_plugin.strategy.resume import random_state
from lightning_plugin.strategy.settle import settle
from lightning_plugin.strategy.tiling import Tiling
from lightning_plugin.strategy.together import join, same_batch, same_random_numbers


class ParallelTiling(Tiling):
    """Train on images that do not fit, on several devices and nodes, exactly::

        Trainer(strategy="sft_ddp", devices=4)
        Trainer(strategy=SFTDDPStrategy(budget="8GiB"), devices=4, num_nodes=2)
        Trainer(strategy=SFTDDPStrategy(split="image"), devices=4)

    With ``split="batch"`` each process has its own images, as with Lightning's DDP: gradients are averaged over
    processes, and with ``sync_batchnorm=True`` BatchNorm statistics are those of all images together, on CPUs too.

    With ``split="image"`` all processes have the same batch, of one slide usually, and share its tiles. The result is
    that of one process: statistics are those of the whole image, in every BatchNorm. What a plan stores between
    segments is exchanged, and each process holds it whole, on the tier of the plan: the budget of each process is what
    one process alone would need. What fits the budget without tiles is computed by every process.

    Args:
        budget: Device memory that a step may use in each process, such as ``"8GiB"``. Without it and without
            ``tiles``: most of what is free on an accelerator, half of the machine's memory on a CPU.
        tiles: Into how many tiles to cut each spatial axis, instead of a budget.
        backward_tiles: The same for the backward pass, where it should differ.
        host_budget: Host memory for what does not fit the device.
        disk: Whether what fits neither may go to temporary files.
        halo: What neighbouring tiles do about the rows between them: both compute them ("recompute"), one hands
            them on ("share"), or "auto", which is faster; or how the network is split ("split", "stochastic_split"),
            which is an approximation: see `SFTStrategy`.
        splits: Into how many splits each axis of space is then cut, on every process alike.
        split_depth: The share of window operators, or the module, where splits end.
        wobble: The most that a stochastic cut moves, in sides of a split.
        half: Keep maps that leave the device as bfloat16. An approximation: gradients lose digits.
        chains: Whether long runs of equal layers are planned as one, with few maps stored at a time: "auto" in networks
            of thousands of operators, "always" or "never".
        compile: Whether tiles that come often are compiled: "never", "tiles" (`torch.compile`), or "graphs" (as CUDA
            graphs besides).
        trim: Whether the process gives freed memory back to the system where it keeps much more than a budget counts,
            on a CPU.
        tile_over: The size from which on a dense tensor of a batch is tiled; a small part of the budget if
            not given.
        split: What the processes share: ``"batch"``, or the tiles of each ``"image"``.
        find_unused_parameters: As in `torch.nn.parallel.DistributedDataParallel`.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default what suits the device.
        start_method: How processes are started: ``"popen"`` runs the script again, the others are those of
            `multiprocessing`.
        options: What else Lightning's ``DDPStrategy`` takes.
    """

    strategy_name = "sft_ddp"
    _layer_sync: Any
    lightning_module: Any
    root_device: torch.device

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
        chains: Chains = "auto",
        compile: Compile = "never",
        trim: bool = True,
        split: Literal["batch", "image"] = "batch",
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        if split not in ("batch", "image"):
            raise ValueError(f'split is "batch" or "image", not {split!r}')
        if split == "image" and halo == "share":
            raise ValueError('tiles that hand rows on run one after the other: with split="image" use halo="recompute"')
        super().__init__(  # type: ignore[call-arg]
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **options,
        )
        self._tile(
            tile_over, budget=budget, tiles=tiles, backward_tiles=backward_tiles, host_budget=host_budget, disk=disk,
            halo=halo, splits=splits, split_depth=split_depth, wobble=wobble, half=half, chains=chains, compile=compile,
            trim=trim, parameters="device",  # ranks add up gradients where their parameters are
        )  # fmt: skip
        self._forward_redirection: Any = Settling(self._forward_redirection, self)
        self.split = split

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.split == "image":
            join(self.root_device, self.settings)
            self._least = self._least_bytes()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For the sampler that Lightning puts in: which part of the data is this rank's."""
        if self.split == "image":
            return {"num_replicas": 1, "rank": 0}
        return super().distributed_sampler_kwargs  # type: ignore[misc,no-any-return]

    def setup(self, trainer: Any) -> None:
        """As Lightning's, with layers that synchronise under tiles and on any device."""
        asked, self._layer_sync = self._layer_sync, None
        if trainer.state.fn == "fit":
            synchronize(self.lightning_module, everything=asked is not None, alone=self.split == "image")
        super().setup(trainer)  # type: ignore[misc]
        self._layer_sync = asked
        if self.settings.team is not None:
            same_random_numbers(self.settings.team)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As `Tiling`'s; ranks that share an image have to be given the same one."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self.settings.team is not None:
            same_batch(self.settings.team, batch)
            same_random_numbers(self.settings.team)
        return batch

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

    def _own_state(self, states: list[dict[str, Any]]) -> dict[str, Any] | None:
        return states[0] if self.split == "image" else super()._own_state(states)

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
