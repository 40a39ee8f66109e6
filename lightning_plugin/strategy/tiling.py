"""Tiling, the mixin of every strategy of this package: steps on images run tile by tile; and the strategy for one
device.

Lightning's hooks stay as they are. A batch's images become lazy when it is moved to the device; a step on
them records; when it returns, what it recorded is computed under one plan. Everything after that (clipping,
scaling, accumulation, logging, optimizers) sees ordinary tensors with ordinary gradients.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from lightning_plugin.capture.lazy import LazyTensor, materialize, materialize_all, recording_eagerly
from lightning_plugin.engine import Engine
from lightning_plugin.execute.finite import NonFinite
from lightning_plugin.memory import default_budget
from lightning_plugin.options import Options, Size, StrategyWords
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.optimizers import held_bytes, state_bytes, state_of
from lightning_plugin.plans import MOST_PLANS, Planner, put_last, shorten
from lightning_plugin.strategy.bases import SingleDeviceStrategy
from lightning_plugin.strategy.batch import Moving, begin
from lightning_plugin.strategy.checkpoints import KEY, WholeCheckpoints, random_state, restore_random, restore_threads
from lightning_plugin.strategy.feedback import Feedback, StepReport
from lightning_plugin.strategy.update import by_parameter, reasons, separable, within_backward
from lightning_plugin.units import parse_bytes

#: Networks keep at most about this many bytes for each byte of their input, so smaller inputs need no tiles.
MOST_BYTES_PER_INPUT_BYTE = 1024


log = logging.getLogger(__name__)


class Tiling:
    """Mixed into a Lightning strategy; the methods are those of `pytorch_lightning.strategies.Strategy`."""

    engine: Engine
    _checkpoint_io: Any
    #: True if the user chose a budget or tiles; a budget that was measured is another in a run that is resumed.
    _chosen: bool
    #: Batches whose step the planner left whole: they need no recording.
    _roomy: dict[str, None]
    _tile_over: Size
    _least: int
    _images: list[LazyTensor]
    _batch: str
    _resumed: dict[str, Any] | None
    #: True if streamed parameters are updated within backward; None before the first has been.
    _fused: bool | None

    def _tile(self, tile_over: Size, words: StrategyWords) -> None:
        """Keep the user's choices; called by the constructors."""
        options = Options.parse(words, StrategyWords)
        self.engine = Engine(Planner(options, accumulates=True))
        self._chosen = options.budget is not None or options.tiles is not None
        self._roomy = {}
        self._tile_over = tile_over
        self._least = 0
        self._images = []
        self._batch = ""
        self._resumed = None
        self._fused = None

    @property
    def checkpoint_io(self) -> Any:
        """The writer of checkpoints: the user's, the one that the user has wrapped around Lightning's, or
        `WholeCheckpoints`."""
        found = self._checkpoint_io
        if found is None:
            found = self._checkpoint_io = WholeCheckpoints()
        elif hasattr(found, "checkpoint_io"):
            found.checkpoint_io = WholeCheckpoints()
        return found

    @checkpoint_io.setter
    def checkpoint_io(self, given: Any) -> None:
        self._checkpoint_io = given

    @property
    def feedback(self) -> Feedback:
        """Tells about steps. A copy of the strategy has one of its own, as it has an engine of its own."""
        if not isinstance(self.engine.listener, Feedback):
            self.engine.listener = Feedback(self.engine.progress)
        return self.engine.listener

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step that was run tile by tile."""
        return self.engine.plan

    @property
    def peak_bytes(self) -> int:
        """Bytes that the last step that was run tile by tile held on the device at its worst moment: parameters,
        gradients, optimizers' state, and what the step made."""
        return self.engine.peak_bytes

    @property
    def non_finite(self) -> NonFinite | None:
        """In the first step whose loss was not finite, what was the first not to be."""
        return self.engine.non_finite

    @property
    def report(self) -> StepReport | None:
        """The report of the last step that was run tile by tile: seconds, peak, waiting."""
        return self.feedback.report

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        if not self._chosen:
            self.engine.planner.options = replace(self.engine.options, budget=default_budget(device))
        self.engine.planner.device = self.engine.planner.device or device.type
        self._least = self._least_bytes()

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        optimizers: Sequence[torch.optim.Optimizer] = self.optimizers  # type: ignore[attr-defined]
        self.engine.owed = {key: size for o in filter(separable, optimizers) for key, size in state_of(o).items()}
        self.engine.planner.reserve(sum(map(state_bytes, optimizers)), anew=True)
        self.feedback.connect(trainer)
        self.feedback.warn(self.engine.options.approximation)

    def model_to_device(self) -> None:
        """As Lightning's; a model larger than the budget stays where it is, and plans say where it is to live."""
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

    def _least_bytes(self) -> int:
        """The size from which on a dense tensor is tiled."""
        if self._tile_over is not None:
            return parse_bytes(self._tile_over)
        budget = self.engine.options.budget
        return 0 if budget is None else budget // MOST_BYTES_PER_INPUT_BYTE

    # Batches

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batch on the device, with its large images lazy and where they were."""
        self.feedback.end()
        target = device or self.root_device  # type: ignore[attr-defined]
        batch, described = begin(batch, target, self.engine, self._least)
        self._batch = f"{self._stage} {described}" if described else ""
        moving = Moving(target, self.engine, sys.maxsize if self._batch in self._roomy else self._least)
        with moving:
            batch = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        batch = moving.finish(batch)
        self._images = moving.images
        return batch

    @property
    def _stage(self) -> str:
        """The Trainer's stage: a step that trains needs more room than one that validates."""
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
        """Run a step of the user's module, and settle what it recorded."""
        if not self._images:
            return step(*args, **kwargs)
        optimizers: Sequence[torch.optim.Optimizer] = self.optimizers  # type: ignore[attr-defined]
        self.engine.planner.reserve(sum(map(held_bytes, optimizers)))
        self.feedback.begin()
        with recording_eagerly():
            result = materialize_all(step(*args, **kwargs), self._images)
        if self._batch and all(left_whole(plan) for plan in self.feedback.ran):
            put_last(self._roomy, self._batch, None, MOST_PLANS)
        self._pause(more=torch.is_grad_enabled())
        return result

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Automatic optimization has an ordinary loss by now, ``manual_backward`` may have a lazy one."""
        value = materialize(closure_loss)
        with self._updating():
            loss: Tensor = super().backward(value, optimizer, *args, **kwargs)  # type: ignore[misc]
        if self._images:
            self._pause(more=not self.lightning_module.automatic_optimization)  # type: ignore[attr-defined]
        return loss

    def _updating(self) -> AbstractContextManager[None]:
        """A backward pass, in which what is streamed is updated if nobody looks; see [Note: update] in `update`."""
        homes, optimizers = self.engine.homes, self.optimizers  # type: ignore[attr-defined]
        if not homes:
            return nullcontext()
        why = list(reasons(optimizers, self.lightning_module.trainer))  # type: ignore[attr-defined]
        if self._fused is None:
            how = f"when the optimizer steps: {'; '.join(why)}" if why else "within backward"
            log.info("streamed parameters are updated %s", how)
        self._fused = not why
        for optimizer in optimizers:
            by_parameter(optimizer, homes)
        return within_backward(optimizers, homes) if self._fused else nullcontext()

    def _pause(self, more: bool) -> None:
        """The step, or one of its backward passes, is over; ``more`` of it may follow."""
        self.feedback.pause(self.engine.peak_bytes)
        if not more:
            self.feedback.end()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if "optimizer_states" in checkpoint:  # else it holds weights, and nothing is to be resumed
            checkpoint[KEY] = {
                **self.engine.planner.state(),
                "roomy": list(self._roomy),
                "threads": torch.get_num_threads(),
                "random": self._random_states(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Setup is what makes a module double precision; restored before it, weights would be rounded to single."""
        precision = self.precision_plugin.precision  # type: ignore[attr-defined]
        return precision == "64-true" or super().restore_checkpoint_after_setup  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._resumed = checkpoint.get(KEY)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self._resumed is not None:
            if self.engine.planner.load(self._resumed, self._chosen):
                self._roomy |= dict.fromkeys(self._resumed["roomy"])
                shorten(self._roomy, MOST_PLANS)
            self._least = self._least_bytes()
            restore_threads(self._resumed["threads"])
            self._restore_random()

    def on_train_start(self) -> None:
        super().on_train_start()  # type: ignore[misc]
        # Making the loader's iterator drew numbers. It does so too where an epoch begins in a run that goes on; in the
        # middle of an epoch it was made long ago.
        if self._resumed is not None and self.lightning_module.trainer.fit_loop.restarted_mid_epoch:  # type: ignore[attr-defined]
            self._restore_random()
        self._resumed = None

    def _random_states(self) -> list[dict[str, Any]]:
        """The state of the generators of every rank."""
        return [random_state(self.root_device)]  # type: ignore[attr-defined]

    def _restore_random(self) -> None:
        assert self._resumed is not None
        state = self._own_state(self._resumed["random"])
        if state is not None:
            restore_random(state, self.root_device)  # type: ignore[attr-defined]

    def _own_state(self, states: list[dict[str, Any]]) -> dict[str, Any] | None:
        """This rank's of the states that a checkpoint kept; none where there were fewer ranks."""
        rank: int = self.global_rank  # type: ignore[attr-defined]
        return states[rank] if rank < len(states) else None

    def teardown(self) -> None:
        self._images = []
        self.feedback.end()
        self.feedback.trainer = None
        super().teardown()  # type: ignore[misc]


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


def left_whole(plan: Plan) -> bool:
    """True if a plan holds as much as plain PyTorch: nothing is stored to be recomputed from."""
    grad = torch.is_grad_enabled()
    return all(s.keep or (not grad and s.forward.tiles == 1 and s.tier == "device") for s in plan.segments)
