"""What the recipes in `datasets/` share: official tables in, our manifest out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from wsi_trainer import tables
from wsi_trainer.errors import UserError
from wsi_trainer.words import clean

COLUMNS = ("slide", "label", "patient", "site", "split")
Row = Mapping[str, str]
Translate = Callable[[Row], Row]
"""From a line of the official table to a line of the manifest, its slide without folder or extension."""


def read_table(path: Path, columns: Iterable[str]) -> Iterator[dict[str, str]]:
    """The lines of a CSV file that must have these columns."""
    if not path.is_file():
        raise UserError(f"there is no table at {path}")
    table = tables.read_table(path)
    if missing := set(columns) - set(table.columns):
        has = ", ".join(table.columns) or "none"
        raise UserError(f"{path} has no column {sorted(missing)[0]}; its columns are {has}: is it the right table?")
    yield from (dict(row) for _, row in table.rows)


def find_slides(folder: Path, endings: Iterable[str]) -> dict[str, Path]:
    """The slides in a folder and those below it, by their names without the ending."""
    found: dict[str, Path] = {}
    for ending in endings:
        for path in sorted(folder.rglob(f"*{ending}")):
            name = path.name[: -len(ending)]
            if name in found and found[name].suffix == path.suffix:
                raise UserError(f"{name} is there twice: {found[name]} and {path}; remove one")
            found.setdefault(name, path)
    return found


def make_manifest(
    rows: Iterable[Row], manifest: Path, slides: Path | None, endings: tuple[str, ...]
) -> tuple[int, list[str]]:
    """Writes the manifest.

    Args:
        rows: Its lines, each slide without folder or ending.
        manifest: The file to write.
        slides: The folder of the slides: only those that are there are listed. None lists all as NAME + ending.
        endings: Endings of the slides' files, the preferred one first.

    Returns:
        How many slides are listed, and the names of those that are not there.
    """
    found = None if slides is None else find_slides(slides, endings)
    lines, missing = [], []
    for row in rows:
        name = row["slide"]
        if found is None:
            path = f"{name}{endings[0]}"
        elif name in found:
            path = os.path.relpath(found[name], manifest.parent)
        else:
            missing.append(name)
            continue
        lines.append({**{column: row.get(column, "") for column in COLUMNS}, "slide": path})
    if not lines:
        raise UserError(f"{slides}: none of the {len(missing)} slides of the table is there, such as {missing[0]}")
    tables.write_table(manifest, COLUMNS, ([line[column] for column in COLUMNS] for line in lines), keep=True)
    return len(lines), missing


def run(description: str, columns: Iterable[str], translate: Translate, endings: tuple[str, ...]) -> int:
    """The command line that all recipes have: TABLE MANIFEST [--slides FOLDER]."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("table", type=Path, help="the official label file")
    parser.add_argument("manifest", type=Path, help="the manifest to write")
    parser.add_argument("--slides", type=Path, help="folder of the slides; without it all are listed")
    options = parser.parse_args()
    try:
        rows = [translate(row) for row in read_table(options.table, columns)]
        listed, missing = make_manifest(rows, options.manifest, options.slides, endings)
    except UserError as error:
        print(clean(error), file=sys.stderr)
        return error.exit_code
    print(f"{listed} slides in {options.manifest}")
    if missing:
        print(clean(f"{len(missing)} slides of the table are not in {options.slides}, such as {missing[0]}"))
    return 0
