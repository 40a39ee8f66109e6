"""The tables of a folder of stores: manifest.csv, which people complete and training reads, and summary.csv.

Runs over different slides share a folder, even at the same time, and people write labels into manifest.csv. So a run
adds what is new and leaves every other row and cell as it is. The invariant: summary.csv has a row for each store that
is there and whole, manifest.csv has these rows and perhaps more, and what is still *due* after a killed run is listed
by the next one.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from wsi_trainer.errors import UserError
from wsi_trainer.tables import Table, inert, lively, read_table, table_bytes

from .convert import Converted, Job, stored
from .inputs import Listed
from .staging import Locked, due, lock, seal_of, settle
from .store.files import replace_file

MANIFEST = "manifest.csv"
SUMMARY = "summary.csv"
_OWN = ("slide", "mpp")
_UNWANTED = ("path",)  # of the slide, not of the store
_SUMMARY_COLUMNS = tuple(f.name for f in fields(Converted) if f.name != "skipped")

Row = dict[str, str]


@dataclass(frozen=True)
class Told:
    """What a run has to say about the tables."""

    stores: tuple[Converted, ...]
    """All stores of the folder."""
    kept: tuple[str, ...] = ()
    """Cells in which manifest.csv differs from the list of slides that was given, each as a sentence."""
    added: int = 0
    """Rows of earlier runs that manifest.csv lacked."""
    gone: tuple[str, ...] = ()
    """Stores that manifest.csv lists and that are not there."""


def read_manifest_of(out: Path) -> Table | None:
    """The manifest of a folder of stores, or None where it has none yet; an error where it cannot be read."""
    path = out / MANIFEST
    if not path.is_file():
        return None
    table = read_table(path)
    if not table.columns:
        return None
    table.need("slide")
    return table


def update_tables(out: Path, listed: Sequence[Listed]) -> Told:
    """Brings both tables up to date with the stores of these slides, and with what earlier runs left due."""
    try:
        with lock(out, "tables"):
            return _update(out, listed)
    except Locked as error:
        raise UserError(
            f"{out / MANIFEST}: another run is writing it; what is converted is safe, give the same command again"
        ) from error


def _update(out: Path, listed: Sequence[Listed]) -> Told:
    old = read_manifest_of(out)
    marks = due(out)  # before the stores are read: what appears meanwhile is told of by the next run
    told = [mark for mark in marks if seal_of(out / f"{mark.name}.zarr") == mark.seal]
    waiting = dict.fromkeys(mark.name for mark in told)  # each is looked up below
    asked = {item.job.name: item for item in listed}
    names = list(dict.fromkeys([*asked, *waiting, *_summarised(out), *_named(old)]))
    there = [name for name in names if os.path.isdir(f"{out}/{name}.zarr")]  # there may be a million names
    found = {name: row for name in there if (row := stored(Job(Path(), name), out)) is not None}
    rows = [] if old is None else [dict(cells) for _, cells in old.rows]
    present = {name: row for row in rows if (name := _name_of(row)) is not None}
    kept: list[str] = []
    for name, cells in present.items():
        if name in found:
            kept += _complete(out, cells, asked.get(name), found[name], name in waiting)
    new = {name: _new_row(asked.get(name), found[name]) for name in found if name not in present}
    added = sum(name not in asked for name in new) if old is not None else 0
    rows = _in_order(rows, new, list(asked))
    _write(out, old, _columns(old, listed), rows)
    order = [name for row in rows if (name := _name_of(row)) in found]
    stores = tuple(found[name] for name in dict.fromkeys(order) if name is not None)
    _replace(out / SUMMARY, table_bytes(_SUMMARY_COLUMNS, [_for_people(row) for row in stores]))
    settle(out, [mark for mark in told if mark.name in found], [mark for mark in marks if mark.name not in waiting])
    gone = tuple(name for name in present if name not in found and not (out / f"{name}.zarr").exists())
    return Told(stores, tuple(kept), added, gone)


def _for_people(row: Converted) -> dict[str, object]:
    cells = asdict(row)
    cells["rules"] = "; ".join(f"{name} {share:.2%}" for name, share in row.rules.items())
    return {name: inert(value) for name, value in cells.items()}


def _summarised(out: Path) -> list[str]:
    """The stores that summary.csv lists; it is made anew anyway, so one that cannot be read lists none."""
    try:
        table = read_table(out / SUMMARY)
    except (UserError, FileNotFoundError):
        return []
    return [lively(cells["name"]) for _, cells in table.rows] if "name" in table.columns else []


def _named(old: Table | None) -> list[str]:
    return [] if old is None else [name for _, cells in old.rows if (name := _name_of(cells)) is not None]


def _name_of(row: Mapping[str, str]) -> str | None:
    """The name of the store that a row is about, or None where it is about something else."""
    path = posixpath.normpath(row["slide"].strip())
    return path.removesuffix(".zarr") if path.endswith(".zarr") and not path.startswith(("/", "../")) else None


def _complete(out: Path, row: Row, item: Listed | None, store: Converted, fresh: bool) -> list[str]:
    """Fills in what a row lacks; what differs stays as the user wrote it, and is said."""
    kept = []
    if fresh or not row.get("mpp", "").strip():
        row["mpp"] = _number(store.mpp)  # the pixels are other ones than those that the cell was about
    for column, given in _given(item).items():
        if not row.get(column, "").strip():
            row[column] = given
        elif given.strip() and row[column].strip() != given.strip():
            kept.append(f"{out / MANIFEST} keeps {column} {row[column]!r} of {row['slide']}; the list says {given!r}")
    return kept


def _given(item: Listed | None) -> dict[str, str]:
    columns = {} if item is None else item.columns
    return {column: cell for column, cell in columns.items() if column not in (*_OWN, *_UNWANTED)}


def _new_row(item: Listed | None, store: Converted) -> Row:
    return {"slide": store.store, **_given(item), "mpp": _number(store.mpp)}


def _columns(old: Table | None, listed: Sequence[Listed]) -> list[str]:
    given = list(_given(listed[0])) if listed else []
    if old is None:
        return ["slide", *given, "mpp"]
    return list(dict.fromkeys([*old.columns, *given, "mpp"]))


def _in_order(rows: list[Row], new: dict[str, Row], asked: Sequence[str]) -> list[Row]:
    """All rows; a new one comes after the one before it in the list of slides, however the parts of a job array end."""
    there = {name for row in rows if (name := _name_of(row)) is not None}
    before: dict[str, list[Row]] = {}
    after: dict[str, list[Row]] = {}
    pending: list[Row] = []
    anchor: str | None = None
    for name in asked:
        if name in there:
            (before.setdefault(name, []) if anchor is None else after.setdefault(anchor, [])).extend(pending)
            pending, anchor = [], name
        elif name in new:
            pending.append(new[name])
    if anchor is not None:
        after.setdefault(anchor, []).extend(pending)
        pending = []
    ordered: list[Row] = []
    for row in rows:
        key = _name_of(row) or ""
        ordered += [*before.pop(key, []), row, *after.pop(key, [])]
    listed = set(asked)
    return [*ordered, *pending, *(row for name, row in new.items() if name not in listed)]


def _write(out: Path, old: Table | None, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Writes the manifest, unless it says all this already: then not a byte of the user's file changes."""
    if old is not None and tuple(columns) == old.columns and list(rows) == [cells for _, cells in old.rows]:
        return
    _replace(out / MANIFEST, table_bytes(columns, rows))


def _replace(path: Path, data: bytes) -> None:
    try:
        replace_file(path, data)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; what is converted is safe, give the same command again"
        ) from error


def _number(value: float | None) -> str:
    return "" if value is None else str(value)
