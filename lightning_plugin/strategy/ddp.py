"""`SFTDDPStrategy`, the strategy for several devices and nodes.

With ``split="image"`` the ranks share the tiles of one image (see `team`). All of them have to run the same code on the
same batch with the same random numbers. Before each step fingerprints of the batches are compared, and a difference is
an error on all ranks.

[Note: averages] A `DistributedDataParallel` holds the gradients of all parameters on the device, in buckets. Where
parameters may live below it, the module is not wrapped. In place of the wrapper's work, each rank begins with the first
rank's parameters and buffers, takes the first rank's buffers before each step, and averages gradients after backward,
one parameter at a time in the order of the module, on the parameter's tier. A parameter that has no gradient on any
rank has none afterwards.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_plugin.boxes import Box
from lightning_plugin.capture.lazy import LazyTensor, materialize_all
from lightning_plugin.options import HomeTier, ModuleOptions, Size, StrategyOptions, inherit_argument_docs
from lightning_plugin.planner.calibrate import local_rates
from lightning_plugin.plans import Planner
from lightning_plugin.private import dense_bytes
from lightning_plugin.residency.homes import Homes
from lightning_plugin.strategy.bases import DDPStrategy, pl_worker_init_function
from lightning_plugin.strategy.checkpoints import random_state, restore_random_state
from lightning_plugin.strategy.synced import convert_sync_batchnorm, revert_sync_batchnorm
from lightning_plugin.strategy.tiling import Tiling
from lightning_plugin.team import Team

#: Number of places of an image that go into a batch's fingerprint.
PROBES = 5
#: Number of elements up to which a tensor goes into the fingerprint whole; of larger ones a sample does.
MAX_WHOLE_ELEMENTS = 4096


def form_team(device: torch.device, planner: Planner) -> None:
    """Make a team of all ranks. They plan with the smallest of their budgets and the first rank's rates."""
    team = Team.of(device)
    budgets = team.all_gather(planner.options.budget)
    planner.team = team
    budget = None if None in budgets else min(b for b in budgets if b is not None)
    # With halo="share" tiles depend on the one before and cannot run on several ranks at once.
    halo = planner.options.halo if planner.options.splitting else "recompute"
    planner.options = replace(planner.options, budget=budget, halo=halo)
    planner.rates = team.all_gather(local_rates(device.type))[0]


def broadcast_random_state(team: Team) -> None:
    """Set the random generators of all ranks to the first rank's state."""
    state = [random_state(team.device) if team.is_first else None]
    dist.broadcast_object_list(state, group=team.group, group_src=0)
    if not team.is_first:
        assert state[0] is not None
        restore_random_state(state[0], team.device)


def require_same_batch(team: Team, batch: Any) -> None:
    """Raise an error on all ranks if their batches differ."""
    team.require_equal(
        fingerprint(batch),
        'with split="image" all ranks compute one batch together, and the ranks were given different batches. Let your '
        "sampler and your dataset return the same on every rank: no part by rank, no random numbers of a rank's own.",
    )


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor], homes: Homes, team: Team) -> None:
    """Average each gradient over ranks, on its parameter's tier; see [Note: averages]."""
    for parameter, is_any in zip(parameters, team.any_rank([p.grad is not None for p in parameters]), strict=True):
        if not is_any:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            homes.place_gradient(parameter)
        whole = parameter.grad.to(team.device).contiguous()
        team.all_reduce(whole)
        parameter.grad.copy_(whole.div_(team.size))
        homes.release_pages_of([parameter.grad])


@torch.no_grad()
def broadcast_values(tensors: Iterable[Tensor], team: Team) -> None:
    """Set tensors, on whatever tier, to the first rank's values, one at a time."""
    for tensor in tensors:
        values = tensor.to(team.device).contiguous()
        team.broadcast(values, 0)
        if not team.is_first:
            tensor.copy_(values)


def fingerprint(batch: Any) -> str:
    """Digest the numbers, the tensors and a few places of each image of a batch. Texts may be local paths: ignored."""
    digest = hashlib.sha256()

    def add(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            digest.update(image_bytes(value))
        elif isinstance(value, Tensor):
            digest.update(f"{tuple(value.shape)}{value.dtype}".encode() + tensor_bytes(value))
        else:
            digest.update(str(value).encode())
        return value

    apply_to_collection(batch, (Tensor, int, float, bool), add)
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    if flat.numel() > MAX_WHOLE_ELEMENTS:
        flat = flat[:: flat.numel() // MAX_WHOLE_ELEMENTS]
    return dense_bytes(flat).tobytes()


def image_bytes(lazy: LazyTensor) -> bytes:
    """Read the values at a few places of a lazy image."""
    parts = [f"{tuple(lazy.shape)}{lazy.dtype}".encode()]
    for image in lazy._session.root().recording_of([lazy._value]).images:
        for i in range(1, PROBES + 1):
            extent, lead = image.layout.extent, image.instances
            space = len(image.source.shape) - lead - 1
            position = (size * i // (PROBES + 1) for size in extent[:space])
            box = Box.of([*((p, p + 1) for p in position), *((0, count) for count in extent[space:])])
            parts.append(tensor_bytes(image.read(box)))
    return b"".join(parts)


class DDPOptions(StrategyOptions, total=False):
    """Options of a strategy for several devices: the engine's, and Lightning's.

    Args:
        find_unused_parameters: As in `torch.nn.parallel.DistributedDataParallel`.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default the device's usual one.
        start_method: How processes are started: ``"popen"`` runs the script again, the others are those of
            `multiprocessing`.
        timeout: How long processes wait for each other.
        gradient_as_bucket_view: As in `torch.nn.parallel.DistributedDataParallel`.
        static_graph: As in `torch.nn.parallel.DistributedDataParallel`.
        bucket_cap_mb: As in `torch.nn.parallel.DistributedDataParallel`.
        ddp_comm_state: As in Lightning's ``DDPStrategy``, with the hook and the wrapper.
        ddp_comm_hook: As in Lightning's ``DDPStrategy``.
        ddp_comm_wrapper: As in Lightning's ``DDPStrategy``.
        model_averaging_period: As in Lightning's ``DDPStrategy``.
        cluster_environment: Lightning's cluster environment.
        parallel_devices: The devices, as Lightning's Trainer sets them.
        accelerator: Lightning's accelerator.
        checkpoint_io: Lightning's checkpoint reader and writer.
        precision_plugin: Lightning's precision plugin.
    """

    find_unused_parameters: bool
    process_group_backend: str | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    timeout: timedelta | None
    gradient_as_bucket_view: bool
    static_graph: bool
    bucket_cap_mb: int
    ddp_comm_state: Any
    ddp_comm_hook: Any
    ddp_comm_wrapper: Any
    model_averaging_period: int | None
    cluster_environment: Any
    parallel_devices: Any
    accelerator: Any
    checkpoint_io: Any
    precision_plugin: Any


inherit_argument_docs(StrategyOptions, DDPOptions)

#: Options of `DistributedDataParallel`, which does not wrap a module whose parameters may live below the device.
WRAPPERS = (
    "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb", "ddp_comm_state",
    "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period",
)  # fmt: skip


class SFTDDPStrategy(Tiling, DDPStrategy):
    """Train exactly on images that do not fit the memory of a device, on several devices and nodes::

        Trainer(strategy="sft_ddp", devices=4)
        Trainer(strategy=SFTDDPStrategy(budget="8GiB"), devices=4, num_nodes=2)
        Trainer(strategy=SFTDDPStrategy(split="image"), devices=4)

    With ``split="batch"`` each process has its own images, as with Lightning's DDP: gradients are averaged over
    processes, and with ``sync_batchnorm=True`` BatchNorm statistics are those of all images together, on CPUs too.

    With ``split="image"`` all processes have the same batch, usually of one slide, and share its tiles. The result is
    that of one process: BatchNorm statistics are those of the whole image. Maps that a plan stores between segments are
    exchanged, and each process holds them whole, on the tier of the plan: each process needs the budget that one
    process alone would need. Batches that fit the budget without tiles are computed by every process.

    Parameters stay on the device, unless ``parameters`` is "auto", "host" or "disk": then those that do not fit live
    below it, with gradients and optimizer states, for each process. Gradients are averaged after backward, there.

    Without ``budget`` and ``tiles``, the budget is most of the free memory of an accelerator, or half of the machine's
    memory on a CPU. The options are those of `lightning_plugin.options.StrategyOptions`, for each process, and those of
    Lightning's ``DDPStrategy``.

    Args:
        split: ``"batch"``: each process has its own images. ``"image"``: the processes share the tiles of each image.
        tile_over: The size from which on a dense tensor of a batch is tiled; by default a small part of the budget.
    """

    strategy_name = "sft_ddp"
    _layer_sync: Any
    lightning_module: Any
    root_device: torch.device

    def __init__(
        self,
        split: Literal["batch", "image"] = "batch",
        tile_over: Size = None,
        **options: Unpack[DDPOptions],
    ) -> None:
        if split not in ("batch", "image"):
            raise ValueError(f'split is "batch" or "image", not {split!r}')
        if split == "image" and options.get("halo") == "share":
            raise ValueError('with halo="share" tiles run one after the other: with split="image" use halo="recompute"')
        ours: Any = {name: value for name, value in options.items() if name in ModuleOptions.__annotations__}
        lightnings: dict[str, Any] = {name: value for name, value in options.items() if name not in ours}
        tier: HomeTier = ours.setdefault("parameters", "device")
        useless = [name for name in WRAPPERS if name in lightnings]
        if tier != "device" and useless:
            raise ValueError(
                f"{', '.join(useless)}: options of DistributedDataParallel, which holds all gradients on the device. "
                f"Leave them out with parameters={tier!r}, or give parameters='device'."
            )
        super().__init__(**{"find_unused_parameters": False, **lightnings})
        self._init_tiling(tile_over, ours)
        #: True if this strategy averages gradients, in place of a wrapper; see [Note: averages].
        self._averages = tier != "device"
        self._is_accumulating = False
        self._forward_redirection: Any = MaterializingRedirection(self._forward_redirection, self)
        self.split = split

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.split == "image":
            form_team(self.root_device, self.engine.planner)
            self._min_bytes = self._compute_min_bytes()

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, with BatchNorms that synchronise in tiled runs too, and on any device."""
        layer_sync, self._layer_sync = self._layer_sync, None
        if self.split == "image":  # Lightning's sampler would shuffle a training loader that does not
            trainer._accelerator_connector.use_distributed_sampler = False
        unshare_memory(self.lightning_module)
        if trainer.state.fn == "fit":
            module, is_shared = self.lightning_module, self.split == "image"
            convert_sync_batchnorm(module, convert_all=layer_sync is not None, same_batch=is_shared)
        super().setup(trainer)  # type: ignore[misc]
        self._layer_sync = layer_sync
        if (team := self.engine.planner.team) is not None:
            broadcast_random_state(team)

    def configure_ddp(self) -> None:
        """Wrap the module as Lightning does; if this strategy averages gradients, only begin alike on all ranks."""
        if not self._averages:
            super().configure_ddp()
            return
        module = self.lightning_module
        broadcast_values((*module.parameters(), *module.buffers()), Team.of(self.root_device))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._averages:
            broadcast_values(self.lightning_module.buffers(), Team.of(self.root_device))
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context of the backward passes that only accumulate gradients."""
        self._is_accumulating = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._is_accumulating = False

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, *args, **kwargs)
        if self._averages and not self._is_accumulating:
            trained = [p for p in self.lightning_module.parameters() if p.requires_grad]
            average_gradients(trained, self.engine.homes, Team.of(self.root_device))
        return loss

    def process_dataloader(self, dataloader: Any) -> Any:
        """Process a loader as Lightning does. If its workers get seeds (``seed_everything(seed, workers=True)``), they
        are the first rank's on all ranks that share an image: augmentations are drawn alike."""
        found: Any = super().process_dataloader(dataloader)
        seeds_workers = bool(int(os.environ.get("PL_SEED_WORKERS", 0)))
        if self.split == "image" and seeds_workers and getattr(found, "worker_init_fn", self) is None:
            found.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return found

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch as `Tiling` does; with ``split="image"`` it has to be the same on all ranks."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if (team := self.engine.planner.team) is not None:
            require_same_batch(team, batch)
            broadcast_random_state(team)
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
        layer_sync, self._layer_sync = self._layer_sync, None  # Lightning would revert layers that it did not convert
        if self.lightning_module is not None:
            revert_sync_batchnorm(self.lightning_module)
        super().teardown()
        self._layer_sync = layer_sync

    def _state_of_rank(self, states: list[dict[str, Any]]) -> dict[str, Any] | None:
        return states[0] if self.split == "image" else super()._state_of_rank(states)

    def _random_states(self) -> list[dict[str, Any]]:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, random_state(self.root_device))  # type: ignore[attr-defined]
        return states


def unshare_memory(module: nn.Module) -> None:
    """Copy parameters and buffers out of shared memory, where all ranks would update the same ones.

    Lightning does so for spawned processes, but not for those of a fork server.
    """
    for t in (*module.parameters(), *module.buffers()):
        if t.device.type == "cpu" and t.is_shared():
            t.data = t.data.clone()


class MaterializingRedirection:
    """Lightning's redirection of a step through the DDP wrapper, with results that are computed inside the wrapper.

    DDP searches the autograd graph of the results for unused parameters; a lazy tensor has no such graph.
    """

    def __init__(self, redirection: Any, strategy: Any) -> None:
        self.redirection = redirection
        self.strategy = strategy

    def __call__(self, wrapper: nn.Module, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        override = vars(module).get(name)
        step = getattr(module, name)

        def materialized(*args: Any, **kwargs: Any) -> Any:
            return materialize_all(step(*args, **kwargs), self.strategy._live_images)

        vars(module)[name] = materialized
        try:
            return self.redirection(wrapper, module, name, *args, **kwargs)
        finally:
            vars(module).pop(name)
            if override is not None:
                vars(module)[name] = override
