"""What a run leaves behind for people: failures.csv, and what it says at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wsi_trainer.errors import UserError
from wsi_trainer.tables import inert, table_bytes
from wsi_trainer.terminal import cell, say

from .cohort import MANIFEST as MANIFEST  # others import it from here
from .cohort import Told
from .convert import Converted
from .pool import Failure
from .store.files import replace_file

_MOST_ROWS = 40
_MOST_NOTES = 5


def write_failures(out: Path, failures: Sequence[Failure], shard: str | None) -> None:
    """Writes why slides of this run were not converted."""
    part = "" if shard is None else f"-{shard.replace('/', '-of-')}"
    path = out / f"failures{part}.csv"
    names = [field.name for field in fields(Failure)]
    rows = [{name: inert(getattr(failure, name)) for name in names} for failure in failures]
    try:
        replace_file(path, table_bytes(names, rows))
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; what is converted is safe, give the same command again"
        ) from error


def show(
    console: Console, out: Path, done: Sequence[Converted], failures: Sequence[Failure], new: int, told: Told
) -> None:
    """The table and the sums at the end of a run."""
    if done and len(done) <= _MOST_ROWS:
        table = Table("slide", "size", "µm/px", "levels", "tissue", "lost by the mask")
        for row in done:
            share = "" if row.tissue is None else f"{row.tissue:.1%}"
            lost = "" if row.lost is None else f"{row.lost:.2%}"
            size = f"{row.height} × {row.width}"
            table.add_row(cell(row.name), size, "" if row.mpp is None else f"{row.mpp:g}", str(row.levels), share, lost)
        console.print(table)
    for row in [row for row in done if row.note][:_MOST_ROWS]:
        say(console, f"{row.name}: {row.note}", lead="note")
    for failure in failures[:_MOST_ROWS]:
        say(console, f"{failure.slide}: {failure.reason} ({failure.kind})", lead="failed", lead_style="red")
    if len(failures) > _MOST_ROWS:
        say(console, f"and {len(failures) - _MOST_ROWS} more")
    _show_notes(console, out, told)
    end = f"; reasons are in {out}/failures*.csv" if failures else ""
    say(
        console,
        f"{len(done)} converted ({new} now), {len(failures)} failed. Train with {out / MANIFEST}{end}",
    )


def _show_notes(console: Console, out: Path, told: Told) -> None:
    for note in told.kept[:_MOST_NOTES]:
        say(console, note, lead="note", lead_style="yellow")
    if len(told.kept) > _MOST_NOTES:
        say(console, f"so do {len(told.kept) - _MOST_NOTES} more cells", lead="note", lead_style="yellow")
    if told.added:
        say(console, f"{out / MANIFEST} lacked {told.added} stores of earlier runs; they are in it again", lead="note")
    if told.gone:
        say(
            console,
            f"{out / MANIFEST} lists {len(told.gone)} stores that are not there, the first is {told.gone[0]}.zarr; "
            "convert them again or remove their lines",
            lead="note",
            lead_style="yellow",
        )
