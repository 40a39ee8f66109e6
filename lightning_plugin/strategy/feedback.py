"""Feedback on a run: the plan before its first step, tiles while a step lasts, the reason of a slow step."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_plugin.plan import Plan
from lightning_plugin.plan_views import summary
from lightning_plugin.plans import put_last
from lightning_plugin.progress import Kind, Progress
from lightning_plugin.strategy.report import Meter, StepReport, tiles_of

#: Steps that are over sooner need no bar of their own.
PATIENCE = 2.0

#: Seconds between two drawings of a bar.
EVERY = 0.1


class TileBar:
    """Counts tiles; shows them, and the time left, once a step has lasted a while."""

    def __init__(self, progress: Progress) -> None:
        self.listeners = progress.listeners
        self.total = self.done = 0
        self.began = self.drawn = 0.0
        self.host: Any = None
        self.shown: Rich | Tqdm | None = None

    def begin(self, host: Any) -> None:
        """A step begins; ``host`` is the Trainer's progress bar, or None where there is to be none."""
        self.end()
        self.host = host if host is not None and host.is_enabled else None
        self.total = self.done = 0
        self.began = time.monotonic()
        if self not in self.listeners and self.host is not None:
            self.listeners.append(self)

    def more(self, tiles: int) -> None:
        """So many tiles are to come."""
        self.total += tiles

    def tile(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self.host is None or now - self.began < PATIENCE or now - self.drawn < EVERY:
            return
        self.drawn = now
        if self.shown is None:
            self.shown = beside(self.host)
        self.shown.show(self.done, self.total)

    def alike(self, count: int) -> None:
        return

    def spent(self, kind: Kind, seconds: float) -> None:
        return

    def end(self) -> None:
        """The step is over."""
        if self.shown is not None:
            self.shown.hide()
        self.shown = None
        if self in self.listeners:
            self.listeners.remove(self)


class Rich:
    """One more line in the Trainer's rich display. Lightning finds its lines by number, so ours stays when hidden."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        found = [t.id for t in progress.tasks if t.description == "tiles"]
        self.line = found[0] if found else progress.add_task("tiles", total=1, visible=False)
        progress.reset(self.line)

    def show(self, done: int, total: int) -> None:
        self.progress.update(self.line, completed=done, total=max(done, total), visible=True)
        self.progress.refresh()

    def hide(self) -> None:
        self.progress.update(self.line, visible=False)


class Tqdm:
    """A line below the Trainer's tqdm bar."""

    def __init__(self, host: Any) -> None:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        position = 2 * getattr(host, "process_position", 0) + 2
        self.bar = tqdm(desc="tiles", total=1, position=position, leave=False, dynamic_ncols=True, file=sys.stdout)

    def show(self, done: int, total: int) -> None:
        self.bar.total = max(done, total)
        self.bar.n = done
        self.bar.refresh()

    def hide(self) -> None:
        self.bar.close()


def beside(host: Any) -> Rich | Tqdm:
    """A bar in the style of the Trainer's."""
    progress = getattr(host, "progress", None)
    return Tqdm(host) if progress is None else Rich(progress)


#: A step that takes longer says why, once for each stage and reason.
SLOW = 10.0
#: So many plans are told as tables, and left as files; all others are told in a line.
MOST_TABLES = 16
#: So many lines are remembered, in order not to be told again.
MOST_LINES = 512

log = logging.getLogger("lightning_plugin")


class Feedback:
    """Tells about the steps of one strategy. ``trainer`` is None outside of a Trainer, ``ran`` are the plans of the
    step under way."""

    def __init__(self, progress: Progress) -> None:
        self.meter = Meter(progress)
        self.bar = TileBar(progress)
        self.trainer: Any = None
        self.ran: list[Plan] = []
        self.tables: dict[tuple[str, str], None] = {}
        self.lines: dict[tuple[str, str], None] = {}
        self.explained: set[tuple[str, str]] = set()

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

    @property
    def stage(self) -> str:
        return "" if self.trainer is None else str(self.trainer.state.stage.value)

    def announce(self, plan: Plan, structure: str, alike: bool = False) -> None:
        """Tell of a new plan before it runs, on rank 0.

        The first plan of a stage and of a network's ``structure`` is printed, and kept where the run's logs are. Plans
        for other sizes take a line, those that are ``alike`` in all but the splits of their step one line together.
        """
        if self.trainer is None or not self.trainer.is_global_zero:
            return
        stage, line = self.stage, summary(plan)
        new = (stage, structure if alike else line) not in self.lines
        put_last(self.lines, (stage, structure if alike else line), None, MOST_LINES)
        if (stage, structure) in self.tables or len(self.tables) == MOST_TABLES:
            if new:
                log.info("%s: %s", stage, line)
            return
        self.tables[stage, structure] = None
        log.info("%s: %s", stage, plan)
        folder = folder_of(self.trainer.loggers[0]) if self.trainer.loggers else None
        if folder is not None and not self.trainer.fast_dev_run:
            write_plan(plan, Path(folder), stage, sum(told == stage for told, _ in self.tables))
        for logger in self.trainer.loggers:
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_text"):  # TensorBoard's, and those that follow it
                experiment.add_text("plan", f"<pre>{plan}</pre>", self.trainer.global_step)

    def begin(self) -> None:
        """A step begins."""
        self.ran.clear()
        self.meter.begin()
        self.bar.begin(getattr(self.trainer, "progress_bar_callback", None))

    def runs(self, plan: Plan, ranks: int = 1) -> None:
        """A plan runs in the step, its tiles shared among so many ranks."""
        self.ran.append(plan)
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
        if report is None or report.seconds < SLOW or (self.stage, report.reason) in self.explained:
            return
        self.explained.add((self.stage, report.reason))
        if self.trainer is None or self.trainer.is_global_zero:
            log.info("%s", report)


def folder_of(logger: Any) -> str | None:
    """The folder that a logger writes to. `Trainer.log_dir` says so too, but asks all ranks, of which only one tells of
    plans."""
    folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
    return None if folder is None else str(folder)


def write_plan(plan: Plan, folder: Path, stage: str, number: int) -> None:
    """Leave a plan as a table and as JSON, under the stage and, from the second on, its number."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"plan-{stage}" + (f"-{number}" if number > 1 else "")
    (folder / f"{name}.json").write_text(plan.to_json(), encoding="utf-8")
    (folder / f"{name}.txt").write_text(f"{plan}\n", encoding="utf-8")
