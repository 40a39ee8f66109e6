"""`Tiling`, the mixin of all strategies: steps on images run tile by tile. `SFTStrategy`, the strategy for one device.

Lightning's hooks stay as they are. A batch's images become lazy when it is moved to the device; a step on them is
recorded; when it returns, the recording runs under one plan. Everything after that (clipping, scaling, accumulation,
logging, optimizers) sees ordinary tensors with ordinary gradients.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from lightning_plugin.capture.lazy import (
    LazyTensor,
    materialize,
    run_users_code,
)
from lightning_plugin.engine import Engine
from lightning_plugin.execute.finite import NonFinite
from lightning_plugin.kept_calls import is_untiled
from lightning_plugin.memory import default_budget
from lightning_plugin.options import Options, Size, StrategyOptions
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.optimizers import held_bytes, state_bytes, state_of
from lightning_plugin.plans import MAX_PLANS, Planner, drop_first, put_last
from lightning_plugin.strategy.bases import SingleDeviceStrategy
from lightning_plugin.strategy.batch import LazyTransfer, prepare_batch
from lightning_plugin.strategy.checkpoints import (
    KEY,
    WholeCheckpoints,
    random_state,
    restore_random_state,
    restore_threads,
)  # fmt: skip
from lightning_plugin.strategy.feedback import Feedback, StepReport
from lightning_plugin.strategy.update import blockers, is_separable, patch_step, update_in_backward
from lightning_plugin.units import parse_bytes

#: Upper estimate of the bytes that a network saves for backward for each byte of its input. Inputs smaller than this
#: part of the budget need no tiles.
MAX_BYTES_PER_INPUT_BYTE = 1024

log = logging.getLogger(__name__)


class Tiling:
    """Mixin of Lightning strategies; overrides methods of `pytorch_lightning.strategies.Strategy`."""

    engine: Engine
    _checkpoint_io: Any
    #: True if the user set a budget or tiles. A measured budget is replaced by the checkpoint's when a run is resumed.
    _has_user_limits: bool
    #: Descriptions of batches whose steps the planner left untiled: they are not recorded again.
    _untiled: dict[str, None]
    _tile_over: Size
    #: Size from which on a dense tensor is tiled.
    _min_bytes: int
    #: Lazy tensors of the current batch, which the Trainer holds as long as the batch is used.
    _images: list[weakref.ref[LazyTensor]]
    #: Description of the current batch; empty if any image of it is lazy from the start.
    _description: str
    #: This package's state in the checkpoint that is being resumed.
    _resumed: dict[str, Any] | None
    #: True if streamed parameters are updated within backward; None until the first backward pass.
    _updates_in_backward: bool | None

    def _init_tiling(self, tile_over: Size, options: StrategyOptions) -> None:
        """Set the attributes; called by the constructors."""
        parsed = Options.parse(options, StrategyOptions)
        self.engine = Engine(Planner(parsed, accumulates=True))
        self._has_user_limits = parsed.budget is not None or parsed.tiles is not None
        self._untiled = {}
        self._tile_over = tile_over
        self._min_bytes = 0
        self._images = []
        self._description = ""
        self._resumed = None
        self._updates_in_backward = None

    @property
    def checkpoint_io(self) -> Any:
        """The checkpoint writer: the user's own, or `WholeCheckpoints`, which also replaces the inner one of a wrapper
        (such as `AsyncCheckpointIO`)."""
        writer = self._checkpoint_io
        if writer is None:
            writer = self._checkpoint_io = WholeCheckpoints()
        elif hasattr(writer, "checkpoint_io"):
            writer.checkpoint_io = WholeCheckpoints()
        return writer

    @checkpoint_io.setter
    def checkpoint_io(self, writer: Any) -> None:
        self._checkpoint_io = writer

    @property
    def feedback(self) -> Feedback:
        """The listener of this strategy's steps. A copy of the strategy gets its own, as it gets its own engine."""
        if not isinstance(self.engine.listener, Feedback):
            self.engine.listener = Feedback(self.engine.progress)
        return self.engine.listener

    @property
    def plan(self) -> Plan | None:
        """The plan of the last tiled step."""
        return self.engine.plan

    @property
    def peak_bytes(self) -> int:
        """The measured peak of the last tiled step on the device, in bytes: parameters, gradients, optimizer states,
        and all that the step allocated."""
        return self.engine.peak_bytes

    @property
    def non_finite(self) -> NonFinite | None:
        """The first non-finite result in the first step whose loss was not finite; None if there was no such step."""
        return self.engine.non_finite

    @property
    def report(self) -> StepReport | None:
        """The report of the last tiled step: seconds, peak, waiting."""
        return self.feedback.report

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        if not self._has_user_limits:
            self.engine.planner.options = replace(self.engine.options, budget=default_budget(device))
        self.engine.planner.device = self.engine.planner.device or device.type
        self._min_bytes = self._compute_min_bytes()

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        optimizers: Sequence[torch.optim.Optimizer] = self.optimizers  # type: ignore[attr-defined]
        states = map(state_of, filter(is_separable, optimizers))
        self.engine.optimizer_bytes = {key: size for state in states for key, size in state.items()}
        self.engine.planner.reserve(sum(map(state_bytes, optimizers)), new_fit=True)
        self.engine.module = self.lightning_module  # type: ignore[attr-defined]
        self.feedback.connect(trainer)
        self.feedback.warn_of_approximation(self.engine.options.approximation)

    def model_to_device(self) -> None:
        """Move the model as Lightning does. One larger than the budget stays where it is: plans decide its tiers."""
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        module = self.lightning_module  # type: ignore[attr-defined]
        options = self.engine.options
        budget = options.budget
        size = sum(p.nbytes * (2 if p.requires_grad else 1) for p in module.parameters())
        if device.type == "cpu" or budget is None or size < budget or options.parameters == "device":
            super().model_to_device()  # type: ignore[misc]
            return
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)

    def _compute_min_bytes(self) -> int:
        """Return the size from which on a dense tensor is tiled."""
        if self._tile_over is not None:
            return parse_bytes(self._tile_over)
        budget = self.engine.options.budget
        return 0 if budget is None else budget // MAX_BYTES_PER_INPUT_BYTE

    # Batches

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; its large images become lazy and stay in host memory."""
        self.feedback.end_step()
        target = device or self.root_device  # type: ignore[attr-defined]
        batch, description = prepare_batch(batch, target, self.engine, self._min_bytes)
        self._description = f"{self._stage} {description}" if description else ""
        as_written = self._description in self._untiled and not self.engine.homes  # streamed parameters are not there
        min_bytes = sys.maxsize if as_written else self._min_bytes
        with LazyTransfer(target, self.engine, min_bytes) as transfer:
            batch = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        batch = transfer.finish(batch)
        self._images = list(map(weakref.ref, transfer.images))
        return batch

    @property
    def _stage(self) -> str:
        """The Trainer's stage: a training step needs more memory than a validation step of the same batch."""
        module = self.lightning_module  # type: ignore[attr-defined]
        return "" if module is None or module._trainer is None else str(module._trainer.state.stage)

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().training_step, args, kwargs)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().validation_step, args, kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().test_step, args, kwargs)  # type: ignore[misc]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().predict_step, args, kwargs)  # type: ignore[misc]

    def _step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step of the user's module, and compute the lazy tensors in its result."""
        if not self._images:
            return step(*args, **kwargs)
        optimizers: Sequence[torch.optim.Optimizer] = self.optimizers  # type: ignore[attr-defined]
        self.engine.planner.reserve(sum(map(held_bytes, optimizers)))
        self.feedback.begin_step()
        images = self._live_images
        result = run_users_code(partial(step, *args, **kwargs), images, images)
        if self._description and all(is_untiled(plan) for plan in self.feedback.plans):
            put_last(self._untiled, self._description, None, MAX_PLANS)
        self._end_pass(is_last=not torch.is_grad_enabled())
        return result

    @property
    def _live_images(self) -> list[LazyTensor]:
        """The lazy tensors of the current batch."""
        return [image for ref in self._images if (image := ref()) is not None]

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run Lightning's backward, on the value of a loss that may still be lazy under ``manual_backward``."""
        value = materialize(closure_loss)
        with self._backward_context():
            loss: Tensor = super().backward(value, optimizer, *args, **kwargs)  # type: ignore[misc]
        if self._images:
            self._end_pass(is_last=self.lightning_module.automatic_optimization)  # type: ignore[attr-defined]
        return loss

    def _backward_context(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass: it updates streamed parameters if it may; see [Note: update] in
        `update`."""
        homes, optimizers = self.engine.homes, self.optimizers  # type: ignore[attr-defined]
        if not homes:
            return nullcontext()
        reasons = list(blockers(optimizers, self.lightning_module.trainer))  # type: ignore[attr-defined]
        if self._updates_in_backward is None:
            when = f"when the optimizer steps: {'; '.join(reasons)}" if reasons else "within backward"
            log.info("streamed parameters are updated %s", when)
        self._updates_in_backward = not reasons
        for optimizer in optimizers:
            patch_step(optimizer, homes)
        return nullcontext() if reasons else update_in_backward(optimizers, homes)

    def _end_pass(self, is_last: bool) -> None:
        """Update the step's report after its forward or a backward pass; close it after the last one."""
        self.feedback.end_pass(self.engine.peak_bytes)
        if is_last:
            self.feedback.end_step()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if "optimizer_states" in checkpoint:  # else it holds weights only and cannot be resumed
            checkpoint[KEY] = {
                **self.engine.planner.state_dict(),
                "roomy": list(self._untiled),
                "threads": torch.get_num_threads(),
                "random": self._random_states(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True for float64 too: `setup` converts the module; weights restored earlier would be rounded to float32."""
        precision = self.precision_plugin.precision  # type: ignore[attr-defined]
        return precision == "64-true" or super().restore_checkpoint_after_setup  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._resumed = checkpoint.get(KEY)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self._resumed is not None:
            if self.engine.planner.load_state_dict(self._resumed, self._has_user_limits):
                self._untiled |= dict.fromkeys(self._resumed["roomy"])
                drop_first(self._untiled, MAX_PLANS)
            self._min_bytes = self._compute_min_bytes()
            restore_threads(self._resumed["threads"])
            self._restore_random_state()

    def on_train_start(self) -> None:
        super().on_train_start()  # type: ignore[misc]
        # Making the loader's iterator draws a random number. An uninterrupted run draws it too at the beginning of an
        # epoch, but not in the middle of one.
        if self._resumed is not None and self.lightning_module.trainer.fit_loop.restarted_mid_epoch:  # type: ignore[attr-defined]
            self._restore_random_state()
        self._resumed = None

    def _random_states(self) -> list[dict[str, Any]]:
        """Return the random state of every rank."""
        return [random_state(self.root_device)]  # type: ignore[attr-defined]

    def _restore_random_state(self) -> None:
        assert self._resumed is not None
        state = self._state_of_rank(self._resumed["random"])
        if state is not None:
            restore_random_state(state, self.root_device)  # type: ignore[attr-defined]

    def _state_of_rank(self, states: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return this rank's state of those in a checkpoint; None if the checkpoint is of fewer ranks."""
        rank: int = self.global_rank  # type: ignore[attr-defined]
        return states[rank] if rank < len(states) else None

    def teardown(self) -> None:
        self._images = []
        self.feedback.end_step()
        self.feedback.trainer = None
        super().teardown()  # type: ignore[misc]


class SFTStrategy(Tiling, SingleDeviceStrategy):
    """Train exactly on images that do not fit the memory of one device (CUDA, CPU, MPS)::

        Trainer(strategy="sft")                       # within the memory the device has
        Trainer(strategy=SFTStrategy(budget="8GiB"))

    Without ``budget`` and ``tiles``, the budget is most of the free memory of an accelerator, or half of the machine's
    memory on a CPU. The options are those of `lightning_plugin.options.StrategyOptions`.

    Args:
        tile_over: The size from which on a dense tensor of a batch is tiled; by default a small part of the budget.
        parallel_devices: The device, in a list, as Lightning's Trainer sets it.
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
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)  # type: ignore[call-arg]
        self._init_tiling(tile_over, options)
        self.parallel_devices = parallel_devices  # type: ignore[assignment]  # the Trainer fills it in

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, in a list, as the Trainer sets it."""
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
