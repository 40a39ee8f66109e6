"""The numbers that the demo ends with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wsi_trainer.fit.callbacks import process_peak
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.metrics import ClassPredictions, Interval, auc, paired_difference, score_intervals
from wsi_trainer.terminal import say
from wsi_trainer.words import format_bytes


@dataclass(frozen=True)
class Summary:
    """Results of the demo."""

    full: Interval
    thumbnail: Interval
    difference: Interval
    memory: dict[str, float]
    seconds: float
    report: Path

    @staticmethod
    def of(full: Run, thumbnail: Run, seconds: float, report: Path) -> Summary:
        """Gather the numbers from the two runs."""
        first = ClassPredictions.read(full.predictions("test"))
        second = ClassPredictions.read(thumbnail.predictions("test"))
        return Summary(
            full=score_intervals(first, {"auc": auc})["auc"],
            thumbnail=score_intervals(second, {"auc": auc})["auc"],
            difference=paired_difference(first, second, auc),
            memory=read_json(full.memory),
            seconds=seconds,
            report=report,
        )

    def show(self, console: Console) -> None:
        """Print the numbers and the path of the report."""
        table = Table(title="held-out slides, AUC with 95 % interval", title_justify="left", show_header=False)
        table.add_row("full resolution", str(self.full))
        table.add_row("thumbnail", str(self.thumbnail))
        verdict = "excludes 0" if self.difference.excludes(0) else "includes 0"
        table.add_row("difference, paired", f"{self.difference}{'' if self.difference.absent else f' {verdict}'}")
        if peak := self.memory.get("step_peak_bytes"):
            table.add_row("memory of a step, measured", format_bytes(peak))
        if plain := self.memory.get("plain_bytes"):
            table.add_row("what plain PyTorch holds for backward", format_bytes(plain))
        table.add_row("memory of the process, peak", format_bytes(process_peak()))
        table.add_row("time", f"{self.seconds:.0f} s")
        console.print(table)
        say(console, f"report: {self.report.resolve()}")
