"""Splits that others published: files of CLAM and of Patho-Bench."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wsi_trainer.data.manifest import SPLITS, SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.io.tables import Table, read_table
from wsi_trainer.store.identity import plain_name
from wsi_trainer.words import clean

log = logging.getLogger("wsi_trainer")

YES, NO = "true", "false"


def apply_splits(records: Sequence[SlideRecord], path: Path, fold: int) -> list[SlideRecord]:
    """The records with the splits of a file; whether a patient is in two of them is checked where splits are completed.

    Args:
        records: The slides; their names without extension are those of the file.
        path: CLAM's splits_0.csv or splits_0_bool.csv, or a table of Patho-Bench such as k=all.tsv.
        fold: Which, where the file has several.

    Raises:
        UserError: The file is none of these, lacks a slide, or has one in two splits.
    """
    known = published_splits(path, fold)
    found = []
    for record in records:
        names = (record.slide, plain_name(Path(record.slide)), plain_name(record.path))
        name = next((name for name in names if name in known), None)
        if name is None:
            raise UserError(f"{path} lacks slide {record.slide}; leave it out of the manifest, or give its split")
        found.append(replace(record, split=known.pop(name)))
    if known:
        log.warning(
            "%s has %d slides that the manifest lacks, the first is %s", path, len(known), clean(next(iter(known)))
        )
    return found


def published_splits(path: Path, fold: int = 0) -> dict[str, str]:
    """The split of each slide of a file, by the slide's name."""
    table = read_table(path, "\t" if path.suffix == ".tsv" else ",")
    if "slide_id" in table.columns:
        return _by_fold(table, f"fold_{fold}")
    if set(SPLITS) - set(table.columns):
        raise UserError(
            f"{path} is no file of splits: it has neither the columns slide_id and fold_0, nor train, val, test"
        )
    if fold:
        raise UserError(f"{path} is one fold of CLAM's; give the file of fold {fold}, and leave out data.fold")
    return _by_column(table)


def _by_fold(table: Table, column: str) -> dict[str, str]:
    """Patho-Bench: a line for each slide, a column for each fold. A slide without a split is in none."""
    table.need(column)
    found: dict[str, str] = {}
    for line, row in table.rows:
        if row[column]:
            _put(found, row["slide_id"], row[column], f"{table.path}, line {line}")
    return found


def _by_column(table: Table) -> dict[str, str]:
    """CLAM: a column for each split, with slides below each other, or True where the slide of the line is in it."""
    found: dict[str, str] = {}
    first = table.columns[0]
    marks = {row[split].lower() for _, row in table.rows for split in SPLITS}
    for line, row in table.rows:
        for split in SPLITS:
            marked = row[first] if row[split].lower() == YES else ""
            if name := marked if marks <= {YES, NO} else row[split]:
                _put(found, name, split, f"{table.path}, line {line}")
    return found


def _put(found: dict[str, str], name: str, split: str, where: str) -> None:
    if split not in SPLITS:
        raise UserError(f"{where}: slide {name} is in {split!r}; expected {', '.join(SPLITS)}")
    if found.setdefault(name, split) != split:
        raise UserError(f"{where}: slide {name} is in {split} and in {found[name]}: a model would be tested on it")
