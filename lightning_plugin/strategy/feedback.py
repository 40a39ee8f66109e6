"""What the user gets to see of a run: the plan before its first step, tiles while a step lasts, why a step is slow."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from lightning_plugin.plan import Plan
from lightning_plugin.progress import Progress
from lightning_plugin.strategy.bar import TileBar
from lightning_plugin.strategy.report import Meter, StepReport, tiles_of

#: A step that takes longer says why, once for each plan.
SLOW = 10.0

log = logging.getLogger("lightning_plugin")


class Feedback:
    """Tells about the steps of one strategy. ``trainer`` is None outside of a Trainer."""

    def __init__(self, progress: Progress) -> None:
        self.meter = Meter(progress)
        self.bar = TileBar(progress)
        self.trainer: Any = None
        self.plan: Plan | None = None
        self.told: set[tuple[str, str]] = set()
        self.explained: set[str] = set()

    @property
    def report(self) -> StepReport | None:
        return self.meter.report

    def connect(self, trainer: Any) -> None:
        """A Trainer sets the strategy up. What is told is printed, unless the program has a logging of its own."""
        self.trainer = trainer
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())
            log.propagate = False
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)

    def warn(self, approximation: str) -> None:
        """Say, before anything runs, what is approximate in it."""
        if approximation and self.trainer.is_global_zero:
            log.warning("training is an approximation: %s; evaluation is not split", approximation)

    def announce(self, plan: Plan, alike: str = "") -> None:
        """A new plan, before it runs: printed on rank 0, and kept where the run's logs are.

        A step's logging may differ from one to the next, and with it the plan's key; the same plan is told once,
        and so is one of many that are ``alike``.
        """
        if self.trainer is None or not self.trainer.is_global_zero:
            return
        stage = str(self.trainer.state.stage.value)
        if (stage, alike or str(plan)) in self.told:
            return
        self.told.add((stage, alike or str(plan)))
        log.info("%s: %s", stage, plan)
        folder = folder_of(self.trainer.loggers[0]) if self.trainer.loggers else None
        if folder is not None and not self.trainer.fast_dev_run:
            write_plan(plan, Path(folder), stage)
        for logger in self.trainer.loggers:
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_text"):  # TensorBoard's, and those that follow it
                experiment.add_text("plan", f"<pre>{plan}</pre>", self.trainer.global_step)

    def begin(self) -> None:
        """A step begins."""
        self.meter.begin()
        self.bar.begin(getattr(self.trainer, "progress_bar_callback", None))

    def runs(self, plan: Plan, ranks: int = 1) -> None:
        """A plan runs in the step, its tiles shared among so many ranks."""
        self.plan = plan
        tiles = -(-tiles_of(plan, torch.is_grad_enabled()) // ranks)
        self.meter.planned(plan, tiles)
        self.bar.more(tiles)

    def pause(self, peak: int) -> None:
        """The step, or a backward pass of it, is over; ``peak`` is what it has held."""
        self.meter.pause(peak)

    def end(self) -> None:
        """Nothing more comes of the step."""
        self.meter.stop()
        self.bar.end()
        report = self.report
        if report is None or report.seconds < SLOW or str(self.plan) in self.explained:
            return
        self.explained.add(str(self.plan))
        if self.trainer is None or self.trainer.is_global_zero:
            log.info("%s", report)


def folder_of(logger: Any) -> str | None:
    """Where a logger writes. `Trainer.log_dir` says so too, but asks all ranks, of which only one tells of plans."""
    folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
    return None if folder is None else str(folder)


def write_plan(plan: Plan, folder: Path, stage: str) -> None:
    """Leave a plan as a table and as JSON; a later plan of the same stage gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"plan-{stage}*.json"))) + 1
    name = f"plan-{stage}" + (f"-{number}" if number > 1 else "")
    (folder / f"{name}.json").write_text(plan.to_json(), encoding="utf-8")
    (folder / f"{name}.txt").write_text(f"{plan}\n", encoding="utf-8")
