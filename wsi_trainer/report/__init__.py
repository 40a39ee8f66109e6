"""The report of a run: one HTML page that needs no other file."""

from wsi_trainer.report.render import write_report

__all__ = ["write_report"]
