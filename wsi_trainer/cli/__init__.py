"""The command line, `wsi-train`. The commands are listed in `wsi_trainer.cli.table`."""

from wsi_trainer.cli.entry import main

__all__ = ["main"]
