"""The subcommand: run all checks and show them as a table or as JSON; the exit code says if all is well."""

import json as json_format
import tempfile
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wsi_trainer import __version__
from wsi_trainer.doctor.check import Check, Status, healthy
from wsi_trainer.doctor.formats import check_formats
from wsi_trainer.doctor.machine import check_machine
from wsi_trainer.doctor.packages import check_packages
from wsi_trainer.errors import UserError

COLOURS = {Status.OK: "green", Status.ABSENT: "dim", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def doctor(
    json: bool = False,
    calibrate: bool = False,
    encoders: bool = False,
    encoder: str | None = None,
    weights: Path | None = None,
) -> int:
    """Try everything that training needs and say what works, what is missing and how to add it.

    Args:
        json: print the checks as JSON instead of a table
        calibrate: first measure how fast this machine's device is, for some seconds, so that plans fit it
        encoders: only list the published encoders that a config may name, with their licences
        encoder: only look at this published encoder
        weights: with `encoder`, a file of weights: whether it is that encoder's
    """
    if weights is not None and encoder is None:
        raise UserError("--weights is a file of a published encoder: say which by --encoder")
    if encoders or encoder is not None:
        return _encoders(encoder, weights, json)
    if calibrate:
        import lightning_plugin

        lightning_plugin.calibrate()
    return _told(examine(), json)


def _encoders(name: str | None, weights: Path | None, json: bool) -> int:
    # Networks are slow to import.
    from wsi_trainer.doctor.encoders import check_encoder, list_encoders

    if name is not None:
        return _told(check_encoder(name, weights), json)
    list_encoders()
    return 0


def _told(checks: list[Check], json: bool) -> int:
    """Show the checks; the exit code says whether all is well."""
    if json:
        listed = [asdict(check) for check in checks]
        print(json_format.dumps({"version": __version__, "checks": listed}, indent=2))
    else:
        show(checks, Console())
    return 0 if healthy(checks) else 1


def examine() -> list[Check]:
    """All checks; the files that they make are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="wsi-train-doctor-", ignore_cleanup_errors=True) as folder:
        formats = check_formats(Path(folder))
    return [*check_packages(), *check_machine(Path.cwd()), *formats]


def show(checks: list[Check], console: Console) -> None:
    """The table, one heading for each group, then the commands that mend or add something."""
    table = Table(title=f"wsi-train {__version__}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "status", "detail"):
        table.add_column(heading, overflow="fold")
    for group, members in groupby(checks, lambda check: check.group):
        table.add_row(Text(group, style="bold"))
        for check in members:
            status = Text(check.status.value, style=COLOURS[check.status])
            table.add_row(Text(f"  {check.name}"), status, Text(check.detail))
    console.print(table)
    for check in checks:
        if check.fix:
            line = f"{check.name} ({check.status.value}): {check.fix}"
            console.print(Text(line, style=COLOURS[check.status]))
    verdict = "all that must work works" if healthy(checks) else "what must work does not: see above"
    console.print(Text(verdict, style="bold"))
