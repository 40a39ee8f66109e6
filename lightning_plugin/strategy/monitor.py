"""A callback that logs what every tiled step cost."""

from __future__ import annotations

from typing import Any

from lightning_plugin.strategy.bases import Callback


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
