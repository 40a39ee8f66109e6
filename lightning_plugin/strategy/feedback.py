"""Feedback on a run: the plan before its first step, a bar of tiles during a step, and a report after each step."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_plugin.graph import Recording
from lightning_plugin.plan import ChainPlan, Plan
from lightning_plugin.plan_views import summary
from lightning_plugin.plans import put_last
from lightning_plugin.progress import Kind, Progress
from lightning_plugin.strategy.bases import Callback
from lightning_plugin.units import format_bytes, format_seconds

log = logging.getLogger("lightning_plugin")

#: Smallest share of a step's time for which waiting is reported as the step's bottleneck.
BOTTLENECK_SHARE = 0.3
#: Smallest share for which waiting for pixels is reported beside another bottleneck. Reading is done while the device
#: computes, so that it takes no time as long as it keeps up.
INPUT_SHARE = 0.02

#: Seconds from which on a step is reported in the log, once for each stage and bottleneck.
SLOW_SECONDS = 10.0
#: Number of plans that are logged as tables and written to files; later ones are logged as lines.
MAX_TABLES = 16
#: Number of logged lines that are remembered, in order not to be repeated.
MAX_LINES = 512

#: Seconds after which a step gets a bar of tiles.
BAR_DELAY = 2.0
#: Seconds between two updates of a bar.
BAR_INTERVAL = 0.1

ADVICE = {
    "input": "more threads that read, a store with larger chunks or a faster disk would help",
    "spill": "a larger budget or a faster disk for temporary files would help",
    "compute": "lower precision or a faster device would help",
}
#: Further advice for a step that recomputes.
RECOMPUTED = "a larger budget recomputes less; "


@dataclass
class StepReport:
    """Time, tiles and memory of one step.

    Attributes:
        input_seconds: Time spent waiting for pixels.
        spill_seconds: Time spent waiting for maps on the disk.
        planned_tiles: Tiles that the plans of the step evaluate, on this rank.
    """

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
        """The bottleneck of the step: "input", "spill" or "compute"."""
        waits = {"input": self.input_seconds, "spill": self.spill_seconds}
        worst = max(waits, key=lambda kind: waits[kind])
        return worst if waits[worst] > BOTTLENECK_SHARE * self.seconds else "compute"

    def metrics(self) -> dict[str, float]:
        """Return the numbers that loggers get."""
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
        stalls = self.reason != "input" and shares["input"] > 100 * INPUT_SHARE
        pixels = f"; it is input-bound by {shares['input']:.0f} %: {ADVICE['input']}" if stalls else ""
        budget = RECOMPUTED if self.reason == "compute" and self.recompute_share else ""
        return (
            f"a step of {self.tiles} tiles took {format_seconds(self.seconds)} and at most "
            f"{format_bytes(self.measured_peak_bytes)} ({format_bytes(self.predicted_peak_bytes)} predicted); it is "
            f"{self.reason}-bound ({shares[self.reason]:.0f} %): {budget}{ADVICE[self.reason]}{pixels}"
        )


class StepMonitor(Callback):
    """Callback that logs the memory, time and tiles of every tiled step to the Trainer's loggers::

        Trainer(strategy="sft", callbacks=[StepMonitor()])

    Logged are the predicted and the measured peak, the share of recomputed work, the seconds of the step, the seconds
    (and share) spent waiting for pixels and for the disk, the number of tiles, and the number of tiles that were
    identical to another one and not computed again.

    Args:
        prefix: Prefix of the metrics' names.
    """

    def __init__(self, prefix: str = "sft/") -> None:
        super().__init__()
        self.prefix = prefix
        self._last_report: StepReport | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        report = getattr(trainer.strategy, "report", None)
        if report is None or report is self._last_report:
            return
        self._last_report = report
        metrics = {self.prefix + name: value for name, value in report.metrics().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


class Feedback:
    """Listener of one strategy's steps: logs plans, draws the bar of tiles and fills in the step's report.

    Attributes:
        trainer: The Trainer; None outside of one.
        plans: Plans that the current step has run.
        report: Report of the current or last step.
        trainer_bar: The Trainer's progress bar; None if it shows none.
        tile_bar: Bar of the current step's tiles; None until `BAR_DELAY` is over.
        drawn_at: Time of the bar's last update.
        logged_tables: Plans logged as tables, by stage and structure.
        logged_lines: Plans logged as lines, by stage and text.
        logged_reports: Slow steps reported, by stage and bottleneck.
    """

    def __init__(self, progress: Progress) -> None:
        self.listeners = progress.listeners
        self.trainer: Any = None
        self.plans: list[Plan] = []
        self.report: StepReport | None = None
        self.trainer_bar: Any = None
        self.tile_bar: RichBar | TqdmBar | None = None
        self.drawn_at = 0.0
        self.logged_tables: dict[tuple[str, str], None] = {}
        self.logged_lines: dict[tuple[str, str], None] = {}
        self.logged_reports: set[tuple[str, str]] = set()

    def connect(self, trainer: Any) -> None:
        """Attach the Trainer, and print this package's log unless the program has configured logging."""
        self.trainer = trainer
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())
            log.propagate = False
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)

    def warn_of_approximation(self, approximation: str) -> None:
        if approximation and self.trainer.is_global_zero:
            log.warning("training is an approximation: %s; evaluation is not split", approximation)

    @property
    def stage(self) -> str:
        return "" if self.trainer is None else str(self.trainer.state.stage.value)

    def on_new_plan(self, plan: Plan, structure: str, random_splits: bool = False) -> None:
        """Log a new plan, on rank 0.

        The first plan of a stage and a network's ``structure`` is logged as a table and written to the logger's folder.
        Later ones, for other sizes, are logged as lines; those of ``random_splits``, another in each step, once.
        """
        if self.trainer is None or not self.trainer.is_global_zero:
            return
        stage, line = self.stage, summary(plan)
        key = stage, structure if random_splits else line
        is_new = key not in self.logged_lines
        put_last(self.logged_lines, key, None, MAX_LINES)
        if (stage, structure) in self.logged_tables or len(self.logged_tables) == MAX_TABLES:
            if is_new:
                log.info("%s: %s", stage, line)
            return
        self.logged_tables[stage, structure] = None
        log.info("%s: %s", stage, plan)
        folder = log_folder(self.trainer.loggers[0]) if self.trainer.loggers else None
        if folder is not None and not self.trainer.fast_dev_run:
            write_plan(plan, Path(folder), stage, sum(logged == stage for logged, _ in self.logged_tables))
        for logger in self.trainer.loggers:
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_text"):  # TensorBoard's, and those that follow it
                experiment.add_text("plan", f"<pre>{plan}</pre>", self.trainer.global_step)

    def begin_step(self) -> None:
        self.plans.clear()
        self.report = StepReport()
        bar = getattr(self.trainer, "progress_bar_callback", None)
        self.trainer_bar = bar if bar is not None and bar.is_enabled else None
        if self not in self.listeners:
            self.listeners.append(self)

    def on_plan_run(self, plan: Plan, recording: Recording, ranks: int = 1) -> None:
        """Add a plan that the step runs to its report; its tiles are shared among ``ranks``."""
        self.plans.append(plan)
        report = self.report
        if report is not None:
            report.planned_tiles += -(-count_tiles(plan, torch.is_grad_enabled()) // ranks)
            report.predicted_peak_bytes = max(report.predicted_peak_bytes, plan.peak_bytes)
            report.recompute_share = max(report.recompute_share, plan.recompute)

    def on_tiles(self, count: int) -> None:
        report, now = self.report, time.perf_counter()
        assert report is not None
        report.tiles += count
        if self.trainer_bar is None or now - report.began < BAR_DELAY or now - self.drawn_at < BAR_INTERVAL:
            return
        self.drawn_at = now
        self.tile_bar = self.tile_bar or make_tile_bar(self.trainer_bar)
        self.tile_bar.show(report.tiles, report.planned_tiles)

    def on_identical_tiles(self, count: int) -> None:
        assert self.report is not None
        self.report.identical_tiles += count

    def on_wait(self, kind: Kind, seconds: float) -> None:
        assert self.report is not None
        if kind == "input":
            self.report.input_seconds += seconds
        else:
            self.report.spill_seconds += seconds

    def end_pass(self, peak_bytes: int) -> None:
        """Update the report after the forward or a backward pass; further passes of the step may follow."""
        if self.report is not None:
            self.report.seconds = time.perf_counter() - self.report.began
            self.report.measured_peak_bytes = max(self.report.measured_peak_bytes, peak_bytes)

    def end_step(self) -> None:
        """Stop listening, hide the bar and log the report of a slow step."""
        if self in self.listeners:
            self.listeners.remove(self)
        if self.tile_bar is not None:
            self.tile_bar.hide()
            self.tile_bar = None
        report = self.report
        if report is None or report.seconds < SLOW_SECONDS or (self.stage, report.reason) in self.logged_reports:
            return
        self.logged_reports.add((self.stage, report.reason))
        if self.trainer is None or self.trainer.is_global_zero:
            log.info("%s", report)


def log_folder(logger: Any) -> str | None:
    """Return the folder that a logger writes to. `Trainer.log_dir` waits for all ranks, and only rank 0 logs plans."""
    folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
    return None if folder is None else str(folder)


def write_plan(plan: Plan, folder: Path, stage: str, number: int) -> None:
    """Write ``plan-STAGE.json`` and ``plan-STAGE.txt``, with the number in the name from the second plan on."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"plan-{stage}" + (f"-{number}" if number > 1 else "")
    (folder / f"{name}.json").write_text(plan.to_json(), encoding="utf-8")
    (folder / f"{name}.txt").write_text(f"{plan}\n", encoding="utf-8")


class RichBar:
    """Line of tiles in the Trainer's rich display. It is hidden, never removed: Lightning finds its lines by index."""

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


class TqdmBar:
    """Line of tiles below the Trainer's tqdm bar."""

    def __init__(self, trainer_bar: Any) -> None:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        position = 2 * getattr(trainer_bar, "process_position", 0) + 2
        self.bar = tqdm(desc="tiles", total=1, position=position, leave=False, dynamic_ncols=True, file=sys.stdout)

    def show(self, done: int, total: int) -> None:
        self.bar.total = max(done, total)
        self.bar.n = done
        self.bar.refresh()

    def hide(self) -> None:
        self.bar.close()


def make_tile_bar(trainer_bar: Any) -> RichBar | TqdmBar:
    """Make a bar in the style of the Trainer's."""
    progress = getattr(trainer_bar, "progress", None)
    return TqdmBar(trainer_bar) if progress is None else RichBar(progress)


def count_tiles(plan: Plan, grad: bool) -> int:
    """Count the tiles that a run of a plan evaluates, with ``grad`` those of backward too. An untiled link is one."""
    tiles = sum(s.forward.tiles + grad * s.backward.tiles for s in plan.segments if not s.keep)
    return tiles + sum(count_chain_tiles(chain, grad) for chain in plan.chains)


def count_chain_tiles(chain: ChainPlan, grad: bool) -> int:
    """Count the tiles of a chain: forward, recomputed and backward."""
    tiled = [s for s in chain.segments if not s.keep]
    forward, backward = sum(s.forward.tiles for s in tiled), sum(s.backward.tiles for s in tiled)
    unkept = chain.count - chain.kept
    recomputed = max(0, chain.forecast.forwards - unkept) if grad else 0
    if not tiled:
        return chain.count + recomputed + grad * unkept
    return (chain.count + recomputed + grad * unkept) * forward + grad * chain.count * backward
