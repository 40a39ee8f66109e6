"""The command line, `wsi-train`. The commands are listed in `wsi_trainer.cli.commands`."""

from wsi_trainer.cli.commands import main

__all__ = ["main"]
