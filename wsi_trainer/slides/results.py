"""What a run leaves behind for people and for training: manifest.csv, failures.csv, summary.csv, a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .convert import Converted, stored
from .inputs import Listed
from .pool import Failure
from .store.files import replace_file

MANIFEST = "manifest.csv"
_MOST_ROWS = 40


def _write(path: Path, columns: Sequence[str], rows: Sequence[dict[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue().encode())


def write_results(
    out: Path, listed: Sequence[Listed], failures: Sequence[Failure], shard: str | None
) -> list[Converted]:
    """Writes the files of a run; returns all slides of the list that are converted, by this run or before."""
    rows: list[dict[str, object]] = []
    done: list[Converted] = []
    for item in listed:
        converted = stored(item.job, out)
        if converted is not None:
            done.append(converted)
            rows.append({**item.columns, "slide": f"{item.job.name}.zarr", "mpp": converted.mpp})
    columns = ["slide"]
    columns += [name for name in listed[0].columns if name not in ("slide", "mpp")] + ["mpp"]
    _write(out / MANIFEST, columns, rows)
    names = [f.name for f in fields(Converted) if f.name != "skipped"]
    _write(out / "summary.csv", names, [asdict(row) for row in done])
    part = "" if shard is None else f"-{shard.replace('/', '-of-')}"
    _write(out / f"failures{part}.csv", [f.name for f in fields(Failure)], [asdict(f) for f in failures])
    return done


def show(console: Console, out: Path, done: Sequence[Converted], failures: Sequence[Failure], new: int) -> None:
    """The table and the sums at the end of a run."""
    if done and len(done) <= _MOST_ROWS:
        table = Table("slide", "size", "µm/px", "levels", "tissue", "lost by the mask")
        for row in done:
            share = "" if row.tissue is None else f"{row.tissue:.1%}"
            lost = "" if row.lost is None else f"{row.lost:.2%}"
            mpp = "" if row.mpp is None else f"{row.mpp:g}"
            table.add_row(row.name, f"{row.height} × {row.width}", mpp, str(row.levels), share, lost)
        console.print(table)
    for row in [row for row in done if row.note][:_MOST_ROWS]:
        console.print(Text(f"note {row.name}: {row.note}"), soft_wrap=True)
    for failure in failures[:_MOST_ROWS]:
        console.print(f"[red]failed[/red] {failure.slide}: {failure.reason} ({failure.kind})", soft_wrap=True)
    console.print(
        f"{len(done)} converted ({new} now), {len(failures)} failed. "
        f"Train with {out / MANIFEST}" + (f"; reasons are in {out}/failures*.csv" if failures else ""),
        soft_wrap=True,
    )
