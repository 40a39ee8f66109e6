"""Callbacks of a run: estimate, status, slides left out, memory, and checkpoints between epochs."""

from __future__ import annotations

import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from rich.console import Console

from lightning_plugin import Plan, SFTDDPStrategy, SFTStrategy
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.cost import UNLIMITED, checkpoint_bytes, count_pixels, estimate, sentence, shapes_of
from wsi_trainer.fit.folder import note_failure
from wsi_trainer.fit.plan import factors_of, plan_shape
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.status import StatusFile
from wsi_trainer.io.display import clean, say
from wsi_trainer.io.files import replace_file, write_json
from wsi_trainer.models import SlideBatch, SlideModel

log = logging.getLogger("wsi_trainer")

EVERY = 5.0
"""Seconds between two steps that change the status."""
NAMED = 5
"""Losses that are not finite and are named; more of them say nothing new."""


def tiled(trainer: pl.Trainer) -> SFTStrategy | SFTDDPStrategy | None:
    """The strategy of a run tile by tile once it has a plan; None of plain PyTorch."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) and strategy.plan is not None else None


class Estimate(Callback):
    """Plans the largest slide's step when training starts, prints what follows from it, and writes estimate.json."""

    def __init__(self, slides: SlideData, config: TrainConfig, run: Run) -> None:
        self.slides, self.config, self.run = slides, config, run

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, SlideModel)
        if not trainer.is_global_zero or trainer.fit_loop.restarted_mid_epoch or trainer.current_epoch > 0:
            return
        shapes = {split: shapes_of(self.slides.of(split), self.slides.config) for split in ("train", "val", "test")}
        del shapes["test"]  # it was only to be seen whether they can be opened: better now than at the end
        if not shapes["train"]:
            return
        strategy = trainer.strategy
        budget: Any = None
        if isinstance(strategy, (SFTStrategy, SFTDDPStrategy)):
            budget = strategy.engine.options.budget
        largest, data = max(shapes["train"].values(), key=count_pixels), self.slides.config
        if min(largest[2:]) < pl_module.stride:
            raise UserError(
                f"the largest training slide has {largest[3]} × {largest[2]} pixels at data.downsample "
                f"{data.downsample}, and the backbone needs {pl_module.stride} for one position"
            )
        say(Console(), "planning a step on the largest slide, to say what the run costs")
        plan = plan_shape(pl_module, largest, budget or UNLIMITED, pl_module.device.type, factors_of(data))
        if plan is None:
            say(Console(), "there is no estimate: the network reads values while it runs, and is planned as it does")
            return
        facts = estimate(plan, shapes, largest, budget, self.config.devices, checkpoint_bytes(pl_module))
        facts["patches"] = None if data.patches is None else largest[0]
        write_json(self.run.estimate, facts)
        for line in sentence(facts).splitlines():
            say(Console(), line)


class Progress(Callback):
    """Keeps the status of a run: steps at a bounded rate, epochs with their scores, and losses that are not finite."""

    def __init__(self, file: StatusFile, every: float = EVERY) -> None:
        self.file, self.every = file, every
        self._written = float("-inf")
        self._lost = 0
        self._process = psutil.Process()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = int(trainer.num_training_batches)
        self._total = self._batches * (trainer.max_epochs or 0)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        within = progress.current.completed if progress.current.completed < self._batches else 0
        self._first, self._began = trainer.current_epoch * self._batches + within, time.monotonic()
        self._write(trainer, self._first, epochs=trainer.max_epochs)

    def _write(self, trainer: pl.Trainer, done: int, **fields: Any) -> None:
        left = time_left(self._total, self._first, done, time.monotonic() - self._began)
        share = min(done / self._total, 1.0) if self._total else None
        self.file.update(step=trainer.global_step, progress=share, seconds_left=left, not_finite=self._lost, **fields)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: SlideBatch, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else None
        if value is not None and not math.isfinite(value):
            self._not_finite(trainer, batch, batch_idx, value)
        if time.monotonic() - self._written < self.every:
            return
        self._written = time.monotonic()
        strategy = tiled(trainer)
        self._write(
            trainer,
            trainer.current_epoch * self._batches + batch_idx + 1,
            epoch=trainer.current_epoch,
            loss=value,
            memory=self._process.memory_info().rss,
            device_memory=None if strategy is None else strategy.peak_bytes,
        )

    def _not_finite(self, trainer: pl.Trainer, batch: SlideBatch, batch_idx: int, value: float) -> None:
        self._lost += 1
        if self._lost > NAMED:
            return
        where = f"epoch {trainer.current_epoch}, batch {batch_idx}, step {trainer.global_step}"
        strategy = trainer.strategy
        if self._lost == 1 and isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) and strategy.non_finite is not None:
            self.file.update(first_lost=str(strategy.non_finite))
        log.warning(
            "the loss of slide %s is %s (%s): as in plain PyTorch the run goes on, with weights that may be lost; a "
            "lower model.learning_rate or float32 may help%s",
            clean(batch["slide"]), value, where, "; further ones are not named" if self._lost == NAMED else "",
        )  # fmt: skip

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
        epoch = trainer.current_epoch
        self._write(trainer, (epoch + 1) * self._batches, epoch=epoch, scores=scores)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.file.update(step=trainer.global_step, progress=1.0, seconds_left=0.0)


def time_left(total: int, first: int, done: int, seconds: float) -> float | None:
    """Seconds until the end, by the time that this process took for what it has done, validation included.

    Args:
        total: Batches of the whole training.
        first: Batches that were done when the process began.
        done: Batches that are done now.
        seconds: Since it began.
    """
    return None if done <= first else seconds / (done - first) * max(total - done, 0)


class FailureLog(Callback):
    """Writes each to failures.csv and says so at once; ends the run where nothing is left to train on.

    A slide left out of a step counts there as a slide without gradient: the others keep the weight that they would
    have had with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slides: list[str] = []
        """Of this process, in order; a slide that fails in two epochs is there twice."""
        self._epoch = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, SlideModel)
        pl_module.on_failure = self.note
        self._trainer = trainer

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, SlideModel)
        pl_module.on_failure = None

    def note(self, batch: SlideBatch, reason: str) -> None:
        """A slide of this batch is left out."""
        assert self._trainer.state.stage is not None
        stage = str(self._trainer.state.stage.value)
        self.slides.append(batch["slide"])
        self._epoch += stage == "train"
        note_failure(self.path, batch["slide"], stage, self._trainer.current_epoch, reason)

    def on_train_epoch_start(self, *args: Any) -> None:
        self._epoch = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epoch and self._epoch >= trainer.num_training_batches:
            raise UserError(f"none of the {self._epoch} training slides can be read; the reasons are in {self.path}")


class MemoryWatch(Callback):
    """Counts training steps, and keeps the largest measured peak and the plan of the step that needed most.

    Checkpoints hold what it knows: a run that ends after its last one tells of all of its steps when it is continued.

    Args:
        file: Where that plan is written, while the run goes on: one that fails is asked for it, too.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.steps = 0
        self.step_peak_bytes = 0
        self.plan: Plan | None = None
        self.image_shape: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        plan = None if self.plan is None else self.plan.to_json()
        return {"step_peak_bytes": self.step_peak_bytes, "plan": plan, "image_shape": list(self.image_shape)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step_peak_bytes = int(state_dict["step_peak_bytes"])
        self.plan = None if state_dict["plan"] is None else Plan.from_json(state_dict["plan"])
        self.image_shape = tuple(state_dict["image_shape"])

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: SlideBatch,
        batch_idx: int,
    ) -> None:
        self.steps += 1
        shape, strategy = tuple(batch["image"].shape), tiled(trainer)
        if strategy is None or strategy.plan is None:
            self.image_shape = max(self.image_shape, shape, key=math.prod) if self.image_shape else shape
            return
        self.step_peak_bytes = max(self.step_peak_bytes, strategy.peak_bytes)
        if self.plan is None or strategy.plan.plain_bytes > self.plan.plain_bytes:
            self.plan = strategy.plan
            self.image_shape = shape
            self.write_plan()

    def write_plan(self) -> None:
        """Writes the plan down, where there is one and a place for it."""
        if self.file is not None and self.plan is not None:
            replace_file(self.file, (self.plan.to_json() + "\n").encode())


class StepCheckpoint(Callback):
    """Writes last.ckpt every so many steps of the optimizer, also in the middle of an epoch.

    Only where no gradient waits to be accumulated, since a checkpoint has none, and not after the last slide of an
    epoch: the one that follows validation would have to be taken for one before it.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        self.every = every
        self._written = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        step = trainer.global_step
        due = self.every and step != self._written and step % self.every == 0
        if due and not loop._should_accumulate() and not loop.batch_progress.is_last_batch:
            self._written = step
            trainer.save_checkpoint(self.path)


class RandomState(Callback):
    """Keeps the state of PyTorch's generators, from which dropout draws. The tiled strategies do so themselves."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._loaded is None:
            return
        torch.set_rng_state(self._loaded["cpu"].cpu())
        if len(self._loaded["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in self._loaded["cuda"]])
        self._loaded = None


def memory_facts(watch: MemoryWatch, model: SlideModel, data: DataConfig, config: TrainConfig) -> dict[str, Any]:
    """Memory of the steps, and of plain PyTorch on the largest slide."""
    facts: dict[str, Any] = {"process_peak_bytes": process_peak(), "image_shape": list(watch.image_shape)}
    if watch.plan is None and not model.sees_slide:
        return facts | {"engine": "plain PyTorch"}
    if watch.plan is None:
        plan = plan_shape(model, watch.image_shape, UNLIMITED, model.device.type, factors_of(data))
        plain = {} if plan is None else {"plain_bytes": plan.plain_bytes}
        return facts | {"engine": "plain PyTorch", **plain}
    return facts | {
        "engine": "SFTStrategy, tile by tile",
        "budget": config.budget,
        "budget_bytes": watch.plan.budget,
        "step_peak_bytes": watch.step_peak_bytes,
        "plan_peak_bytes": watch.plan.peak_bytes,
        "plain_bytes": watch.plan.plain_bytes,
        "approximation": watch.plan.approximation,
    }


def process_peak() -> int:
    """The most resident memory this process has had, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
