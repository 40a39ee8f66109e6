"""The strategy for several devices and nodes.

With ``split="image"`` the engine shares the tiles of one image (see `team`). It relies on ranks that do the same, on
the same batch, with the same random numbers. Batches that differ are found before a step, by comparing fingerprints,
and are an error on all ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_plugin.boxes import Box
from lightning_plugin.capture.lazy import LazyTensor, materialize_all
from lightning_plugin.options import Options, RankWords, Size, Words, documented
from lightning_plugin.planner.calibrate import local_rates
from lightning_plugin.plans import Planner
from lightning_plugin.private import dense_bytes
from lightning_plugin.strategy.bases import DDPStrategy
from lightning_plugin.strategy.checkpoints import random_state, restore_random
from lightning_plugin.strategy.synced import revert, synchronize
from lightning_plugin.strategy.tiling import Tiling
from lightning_plugin.team import Team

#: Numbers of a tensor, or places of an image, that tell one batch from another.
PROBES = 5
#: Tensors up to this many elements are compared whole.
SMALL = 4096


def join(device: torch.device, planner: Planner) -> None:
    """Make a team of all ranks, and let them plan alike: for the budget that all can keep, with one rank's rates."""
    team = Team.of(device)
    budgets = team.gather(planner.options.budget)
    planner.team = team
    budget = None if None in budgets else min(b for b in budgets if b is not None)
    # Tiles that hand rows on run one after the other, and cannot be shared.
    halo = planner.options.halo if planner.options.splitting else "recompute"
    planner.options = replace(planner.options, budget=budget, halo=halo)
    planner.rates = team.gather(local_rates(device.type))[0]


def same_random_numbers(team: Team) -> None:
    """Give every rank the first one's generators: masks, shuffles and augmentations are drawn alike."""
    state = [random_state(team.device) if team.leads else None]
    dist.broadcast_object_list(state, group=team.group, group_src=0)
    if not team.leads:
        assert state[0] is not None
        restore_random(state[0], team.device)


def same_batch(team: Team, batch: Any) -> None:
    """Refuse batches that are not the same on every rank."""
    team.agree(
        fingerprint(batch),
        'with split="image" all ranks compute one batch together, and the ranks were given different batches. Leave '
        "use_distributed_sampler=True (it then gives all ranks the same), or let your own sampler and dataset return "
        "the same on every rank.",
    )


def fingerprint(batch: Any) -> str:
    """A digest that tells one batch from another: small tensors and numbers whole, of images a few places. Text may
    name a place on the machine, and tells nothing."""
    found = hashlib.sha256()

    def note(thing: Any) -> Any:
        if isinstance(thing, LazyTensor):
            found.update(image_bytes(thing))
        elif isinstance(thing, Tensor):
            found.update(f"{tuple(thing.shape)}{thing.dtype}".encode() + tensor_bytes(thing))
        else:
            found.update(str(thing).encode())
        return thing

    apply_to_collection(batch, (Tensor, int, float, bool), note)
    return found.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    if flat.numel() > SMALL:
        flat = flat[:: flat.numel() // SMALL]
    return dense_bytes(flat).tobytes()


def image_bytes(lazy: LazyTensor) -> bytes:
    """The values at a few places of an image that is read box by box."""
    found = [f"{tuple(lazy.shape)}{lazy.dtype}".encode()]
    for image in lazy._session.root().recorded([lazy._value]).images:
        for i in range(1, PROBES + 1):
            extent, lead = image.layout.extent, image.instances
            space = len(image.source.shape) - lead - 1
            place = (size * i // (PROBES + 1) for size in extent[:space])
            box = Box.of([*((p, p + 1) for p in place), *((0, count) for count in extent[space:])])
            found.append(tensor_bytes(image.read(box)))
    return b"".join(found)


class DDPWords(RankWords, total=False):
    """Options of a strategy for several devices: the engine's, and Lightning's.

    Args:
        find_unused_parameters: As in `torch.nn.parallel.DistributedDataParallel`.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default what suits the device.
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


documented(RankWords, DDPWords)


class SFTDDPStrategy(Tiling, DDPStrategy):
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

    Without a budget and without tiles it is most of what is free on an accelerator, half of the machine's memory on a
    CPU. The options are those of `RankWords`, of each process, and those of Lightning's ``DDPStrategy``.

    Args:
        split: What the processes share: ``"batch"``, or the tiles of each ``"image"``.
        tile_over: The size from which on a dense tensor of a batch is tiled; a small part of the budget if
            not given.
    """

    strategy_name = "sft_ddp"
    _layer_sync: Any
    lightning_module: Any
    root_device: torch.device

    def __init__(
        self,
        split: Literal["batch", "image"] = "batch",
        tile_over: Size = None,
        **options: Unpack[DDPWords],
    ) -> None:
        if split not in ("batch", "image"):
            raise ValueError(f'split is "batch" or "image", not {split!r}')
        if split == "image" and options.get("halo") == "share":
            raise ValueError('tiles that hand rows on run one after the other: with split="image" use halo="recompute"')
        words: Any = {name: given for name, given in options.items() if name in Words.__annotations__}
        theirs: dict[str, Any] = {name: given for name, given in options.items() if name not in words}
        super().__init__(**{"find_unused_parameters": False, **theirs})
        Options.parse(words, RankWords)
        words["parameters"] = "device"  # ranks add up gradients where their parameters are
        self._tile(tile_over, words)
        self._forward_redirection: Any = Settling(self._forward_redirection, self)
        self.split = split

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.split == "image":
            join(self.root_device, self.engine.planner)
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
        unshare(self.lightning_module)
        if trainer.state.fn == "fit":
            synchronize(self.lightning_module, everything=asked is not None, alone=self.split == "image")
        super().setup(trainer)  # type: ignore[misc]
        self._layer_sync = asked
        if (team := self.engine.planner.team) is not None:
            same_random_numbers(team)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As `Tiling`'s; ranks that share an image have to be given the same one."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if (team := self.engine.planner.team) is not None:
            same_batch(team, batch)
            same_random_numbers(team)
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


def unshare(module: nn.Module) -> None:
    """Give a process memory of its own for a module that came to it in shared memory: each rank would update the same
    parameters. Lightning does so for processes that are spawned, and not for those of a fork server."""
    for t in (*module.parameters(), *module.buffers()):
        if t.device.type == "cpu" and t.is_shared():
            t.data = t.data.clone()


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
            return materialize_all(step(*args, **kwargs), self.strategy._images)

        vars(module)[name] = settled
        try:
            return self.redirection(wrapper, module, name, *args, **kwargs)
        finally:
            vars(module).pop(name)
            if own is not None:
                vars(module)[name] = own
