"""Report of a step: its time and the reasons for it, the memory promised and used."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lightning_plugin.plan import ChainPlan, Plan
from lightning_plugin.progress import Kind, Progress
from lightning_plugin.strategy.bases import Callback
from lightning_plugin.units import format_bytes, format_seconds


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


#: From this share of a step's time on, waiting is named as the reason of its slowness.
MOST = 0.3
#: From this share on, waiting for pixels is told whatever the main reason: where reading keeps up with the device, it
#: is done while the device computes.
STALL = 0.02

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


class Meter:
    """Listens to a step and makes its report."""

    def __init__(self, progress: Progress) -> None:
        self.listeners = progress.listeners
        self.report: StepReport | None = None

    def begin(self) -> None:
        self.report = StepReport()
        if self not in self.listeners:
            self.listeners.append(self)

    def planned(self, plan: Plan, tiles: int) -> None:
        """A plan is about to run in this step, with so many tiles."""
        if self.report is not None:
            self.report.planned_tiles += tiles
            self.report.predicted_peak_bytes = max(self.report.predicted_peak_bytes, plan.peak_bytes)
            self.report.recompute_share = max(self.report.recompute_share, plan.recompute)

    def pause(self, peak: int) -> None:
        """The step is over, or one of its backward passes: more may follow. ``peak`` is what it has held."""
        if self.report is None:
            return
        self.report.seconds = time.perf_counter() - self.report.began
        self.report.measured_peak_bytes = max(self.report.measured_peak_bytes, peak)

    def stop(self) -> None:
        if self in self.listeners:
            self.listeners.remove(self)

    def tile(self, count: int) -> None:
        if self.report is not None:
            self.report.tiles += count

    def alike(self, count: int) -> None:
        if self.report is not None:
            self.report.identical_tiles += count

    def spent(self, kind: Kind, seconds: float) -> None:
        if self.report is None:
            return
        if kind == "input":
            self.report.input_seconds += seconds
        else:
            self.report.spill_seconds += seconds


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
