"""Feedback on a run: the plan before its first step, tiles while a step lasts, and a report of each step: its time and
the reasons for it, the memory promised and used."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_plugin.plan import ChainPlan, Plan
from lightning_plugin.plan_views import summary
from lightning_plugin.plans import put_last
from lightning_plugin.progress import Kind, Progress
from lightning_plugin.strategy.bases import Callback
from lightning_plugin.units import format_bytes, format_seconds

log = logging.getLogger("lightning_plugin")

#: From this share of a step's time on, waiting is named as the reason of its slowness.
MOST = 0.3
#: From this share on, waiting for pixels is told whatever the main reason: where reading keeps up with the device, it
#: is done while the device computes.
STALL = 0.02

#: A step that takes longer says why, once for each stage and reason.
SLOW = 10.0
#: So many plans are told as tables, and left as files; all others are told in a line.
MOST_TABLES = 16
#: So many lines are remembered, in order not to be told again.
MOST_LINES = 512

#: Steps that are over sooner need no bar of their own.
PATIENCE = 2.0
#: Seconds between two drawings of a bar.
EVERY = 0.1

ADVICE = {
    "input": "more threads that read, a store with larger chunks or a faster disk would help",
    "spill": "a larger budget or a faster disk for temporary files would help",
    "compute": "a larger budget recomputes less; lower precision or a faster device would help",
}


@dataclass
class StepReport:
    """One step. ``input_seconds`` waited for pixels, ``spill_seconds`` for maps on the disk."""

    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    input_seconds: float = 0.0
    spill_seconds: float = 0.0
    tiles: int = 0
    identical_tiles: int = 0
    planned_tiles: int = 0
    predicted_peak_bytes: int = 0
    measured_peak_bytes: int = 0
    recompute_share: float = 0.0

    @property
    def reason(self) -> str:
        """The main use of the step's time: "input", "spill" or "compute"."""
        waits = {"input": self.input_seconds, "spill": self.spill_seconds}
        worst = max(waits, key=lambda kind: waits[kind])
        return worst if waits[worst] > MOST * self.seconds else "compute"

    def metrics(self) -> dict[str, float]:
        """The numbers for loggers."""
        seconds = max(self.seconds, 1e-9)
        return {
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "recompute_share": self.recompute_share,
            "step_seconds": self.seconds,
            "input_seconds": self.input_seconds,
            "spill_seconds": self.spill_seconds,
            "input_share": self.input_seconds / seconds,
            "spill_share": self.spill_seconds / seconds,
            "tiles": self.tiles,
            "identical_tiles_saved": self.identical_tiles,
        }

    def __str__(self) -> str:
        waits = {"input": self.input_seconds, "spill": self.spill_seconds}
        waits["compute"] = self.seconds - sum(waits.values())
        shares = {kind: 100 * waited / max(self.seconds, 1e-9) for kind, waited in waits.items()}
        stalls = self.reason != "input" and shares["input"] > 100 * STALL
        pixels = f"; it is input-bound by {shares['input']:.0f} %: {ADVICE['input']}" if stalls else ""
        return (
            f"a step of {self.tiles} tiles took {format_seconds(self.seconds)} and at most "
            f"{format_bytes(self.measured_peak_bytes)} ({format_bytes(self.predicted_peak_bytes)} predicted); it is "
            f"{self.reason}-bound ({shares[self.reason]:.0f} %): {ADVICE[self.reason]}{pixels}"
        )


class StepMonitor(Callback):
    """Logs, for every step that was run tile by tile, to the Trainer's loggers: predicted and measured peak, the
    share of work that was recomputed, seconds, those of them spent waiting for pixels and for the disk (and their
    share), the number of tiles, and how many of them were identical to another and cost nothing::

        Trainer(strategy="sft", callbacks=[StepMonitor()])

    Args:
        prefix: What the names begin with.
    """

    def __init__(self, prefix: str = "sft/") -> None:
        super().__init__()
        self.prefix = prefix
        self.seen: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        report = getattr(trainer.strategy, "report", None)
        if report is None or report is self.seen:
            return
        self.seen = report
        metrics = {self.prefix + name: value for name, value in report.metrics().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


class Feedback:
    """Tells about the steps of one strategy: it hears of their plans, and listens to their progress.

    Attributes:
        trainer: The Trainer; None outside of one.
        ran: The plans of the step under way.
        report: The report of the last step.
        host: The Trainer's progress bar, if it shows one.
        bar: The bar beside it that counts the tiles of the step under way, once that has lasted a while.
    """

    def __init__(self, progress: Progress) -> None:
        self.listeners = progress.listeners
        self.trainer: Any = None
        self.ran: list[Plan] = []
        self.report: StepReport | None = None
        self.host: Any = None
        self.bar: Rich | Tqdm | None = None
        self.drawn = 0.0
        self.tables: dict[tuple[str, str], None] = {}
        self.lines: dict[tuple[str, str], None] = {}
        self.explained: set[tuple[str, str]] = set()

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
        self.report = StepReport()
        host = getattr(self.trainer, "progress_bar_callback", None)
        self.host = host if host is not None and host.is_enabled else None
        if self not in self.listeners:
            self.listeners.append(self)

    def runs(self, plan: Plan, ranks: int = 1) -> None:
        """A plan runs in the step, its tiles shared among so many ranks."""
        self.ran.append(plan)
        report = self.report
        if report is not None:
            report.planned_tiles += -(-tiles_of(plan, torch.is_grad_enabled()) // ranks)
            report.predicted_peak_bytes = max(report.predicted_peak_bytes, plan.peak_bytes)
            report.recompute_share = max(report.recompute_share, plan.recompute)

    def tile(self, count: int) -> None:
        report, now = self.report, time.perf_counter()
        assert report is not None
        report.tiles += count
        if self.host is None or now - report.began < PATIENCE or now - self.drawn < EVERY:
            return
        self.drawn = now
        self.bar = self.bar or beside(self.host)
        self.bar.show(report.tiles, report.planned_tiles)

    def alike(self, count: int) -> None:
        assert self.report is not None
        self.report.identical_tiles += count

    def spent(self, kind: Kind, seconds: float) -> None:
        assert self.report is not None
        if kind == "input":
            self.report.input_seconds += seconds
        else:
            self.report.spill_seconds += seconds

    def pause(self, peak: int) -> None:
        """The step is over, or one of its backward passes: more may follow. ``peak`` is what it has held."""
        if self.report is not None:
            self.report.seconds = time.perf_counter() - self.report.began
            self.report.measured_peak_bytes = max(self.report.measured_peak_bytes, peak)

    def end(self) -> None:
        """Nothing more comes of the step."""
        if self in self.listeners:
            self.listeners.remove(self)
        if self.bar is not None:
            self.bar.hide()
            self.bar = None
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


def tiles_of(plan: Plan, grad: bool) -> int:
    """The number of tiles that a run of a plan evaluates, backward too if it will be asked for. A link that runs whole
    is one."""
    tiles = sum(s.forward.tiles + grad * s.backward.tiles for s in plan.segments if not s.keep)
    return tiles + sum(links_of(chain, grad) for chain in plan.chains)


def links_of(chain: ChainPlan, grad: bool) -> int:
    """The tiles of a chain: of the links forward, of those that run again, and of those that are pulled back."""
    tiled = [s for s in chain.segments if not s.keep]
    forward, backward = sum(s.forward.tiles for s in tiled), sum(s.backward.tiles for s in tiled)
    unkept = chain.count - chain.kept
    again = max(0, chain.forecast.forwards - unkept) if grad else 0
    if not tiled:
        return chain.count + again + grad * unkept
    return (chain.count + again + grad * unkept) * forward + grad * chain.count * backward
