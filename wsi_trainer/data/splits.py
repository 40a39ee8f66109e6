"""Splits: slides that train, that choose the checkpoint, and that are only looked at in the end; and folds of them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from wsi_trainer.data.manifest import PATHS, SPLITS, SlideRecord, read_manifest, write_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.io.display import clean
from wsi_trainer.io.tables import Table, read_table
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.slide.names import same_patient, spellings


def divide_marked(groups: Sequence[str], marks: Sequence[Sequence[str]], parts: int, seed: int) -> list[list[int]]:
    """Places of the slides in about equal parts, whole groups, each mark in proportion.

    Args:
        groups: What each slide belongs to and is never parted from.
        marks: The labels that apply to each slide; there may be none.
        parts: How many parts.
        seed: Which of equal choices is taken. The same seed gives the same parts.
    """
    columns = {mark: place for place, mark in enumerate(sorted({mark for some in marks for mark in some}))}
    rows = {group: place for place, group in enumerate(sorted(set(groups)))}
    counts = np.zeros((len(rows), len(columns) + 1))  # slides of each group with each mark; last, all its slides
    for group, some in zip(groups, marks):
        counts[rows[group], [*{columns[mark] for mark in some}, -1]] += 1
    part_of = _deal(counts, parts, np.random.default_rng(seed))
    return [[place for place, group in enumerate(groups) if part_of[rows[group]] == part] for part in range(parts)]


def _deal(counts: np.ndarray, parts: int, rng: np.random.Generator) -> list[int]:
    """The part of each group, by its counts."""
    part_of = np.zeros(len(counts), int)
    lacking = np.tile(counts.sum(0) / parts, (parts, 1))
    left = counts[:, -1] > 0
    tie = rng.permutation(len(counts)) / (1 + len(counts))  # less than a slide: it decides between equals only
    while left.any():
        owners = (counts[left, :-1] > 0).sum(0)  # how many groups can still give each mark
        rarest = int(np.where(owners > 0, owners, np.inf).argmin()) if owners.any() else -1
        # The largest first: small groups can even out later what large ones have spoilt.
        row = int(np.where(left & (counts[:, rarest] > 0), counts[:, rarest] + tie, -1).argmax())
        part = max(range(parts), key=lambda part: (lacking[part, rarest], lacking[part, -1], rng.random()))
        part_of[row], left[row] = part, False
        lacking[part] -= counts[row]
    return [int(part) for part in part_of]


log = logging.getLogger("wsi_trainer")

By = Literal["patient", "site"]
"""Unit that is never divided between two splits: a patient, or a whole site with all its patients."""
_PARTS = 20
"""Parts into which records are divided for a share that is no simple fraction."""
_EXACT, _NEAR = 0.01, 0.05
"""Distance from the share that was asked for: close enough to look no further, and too far to say nothing."""


def complete_splits(
    records: Sequence[SlideRecord], validation: float = 0.2, test: float = 0.2, seed: int = 0, by: By = "patient"
) -> list[SlideRecord]:
    """Fill in the split of each record that has none.

    A manifest without splits is divided into test, val and train. One that has a split for each slide but
    no val gives up part of its train slides for it. A patient never appears in two splits (with `by="site"` no
    site does), and classes are kept in proportion.
    """
    unset = [record for record in records if not record.split]
    if unset and len(unset) != len(records):
        raise UserError(
            f"{len(unset)} of {len(records)} slides have no split, the first is {unset[0].slide}; "
            "give a split to every slide or to none"
        )
    result = list(records)
    if unset:
        result = _move(result, "", "test", test, seed, by)
        result = [replace(record, split=record.split or "train") for record in result]
    if not any(record.split == "val" for record in result):
        share = validation / max(1 - test, 1e-9) if unset else validation
        result = _move(result, "train", "val", share, seed, by)
    check_leakage(result)
    for split in ("train", "val"):
        if not any(record.split == split for record in result):
            raise UserError(f"no slide is in the split {split}; the manifest has {len(result)} slides")
    return result


def check_leakage(records: Sequence[SlideRecord]) -> None:
    """Raise an error that names the first patient with slides in two splits."""
    seen: dict[str, SlideRecord] = {}
    for record in records:
        other = seen.setdefault(record.patient, record)
        if other.split != record.split:
            raise UserError(
                f"patient {record.patient} has slides in two splits: {other.slide} in {other.split}, "
                f"{record.slide} in {record.split}; put all slides of a patient into one"
            )


def divide(records: Sequence[SlideRecord], parts: int, seed: int = 0, by: By = "patient") -> list[list[int]]:
    """Places of the records in about equal parts, whole patients or whole sites, classes in proportion.

    Raises:
        UserError: A class has too few patients for so many parts, or there are too few sites.
    """
    groups = groups_of(records, by)
    labels = [record.label for record in records]
    if len(set(groups)) < parts:
        raise UserError(f"there are {len(set(groups))} {by}s, which is too few for {parts} parts")
    if any(record.marks for record in records):
        return divide_marked(groups, [record.marks for record in records], parts, seed)
    if by == "patient":
        rare = min(set(labels), key=lambda name: _groups_with(name, groups, labels))
        if _groups_with(rare, groups, labels) < parts:
            raise UserError(
                f"class {rare!r} has {_groups_with(rare, groups, labels)} patients, which is too few for {parts} parts"
            )
    from sklearn.model_selection import StratifiedGroupKFold  # half a second, which reading splits does without

    splitter = StratifiedGroupKFold(n_splits=parts, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        # Few sites, or few slides of a class: the proportions are then as good as they can be.
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        return [[int(row) for row in taken] for _, taken in splitter.split(np.zeros(len(labels)), labels, groups)]


def groups_of(records: Sequence[SlideRecord], by: By) -> list[str]:
    """The patient or the site of each record; an error where a site is missing or a patient has two."""
    if by == "patient":
        return [record.patient for record in records]
    for record in records:
        if not record.site:
            raise UserError(f"slide {record.slide} has no site; fill in the column site, or split by patient")
    seen: dict[str, SlideRecord] = {}
    for record in records:
        other = seen.setdefault(record.patient, record)
        if other.site != record.site:
            raise UserError(
                f"patient {record.patient} has slides from two sites: {other.slide} from {other.site}, "
                f"{record.slide} from {record.site}; give both one site, or split by patient"
            )
    return [record.site for record in records]


def _groups_with(label: str, groups: Sequence[str], labels: Sequence[str]) -> int:
    return len({group for group, name in zip(groups, labels) if name == label})


def _fraction(share: float, most: int) -> tuple[int, int]:
    """Numerator and denominator of a share that is near enough, with the smallest denominator, at most `most`."""
    best, nearest = (1, 2), 1.0
    for parts in range(2, min(most, max(_PARTS, round(1 / share))) + 1):
        taken = min(max(1, round(share * parts)), parts - 1)
        if (error := abs(taken / parts - share)) < nearest - 1e-9:
            best, nearest = (taken, parts), error
        if nearest <= _EXACT:
            break
    return best


def _move(
    records: Sequence[SlideRecord], source: str, target: str, share: float, seed: int, by: By
) -> list[SlideRecord]:
    """Move about this share of one split to another, whole patients or sites, classes in proportion."""
    rows = [index for index, record in enumerate(records) if record.split == source]
    if share <= 0 or not rows:
        return list(records)
    there = [records[row] for row in rows]
    groups, labels = groups_of(there, by), [record.label for record in there]
    most = len(set(groups))
    if by == "patient":
        most = min(_groups_with(name, groups, labels) for name in set(labels))
    if most < 2:
        lonely = "a class has a single patient" if by == "patient" else "there is a single site"
        raise UserError(f"{lonely}, so no {target} split can be taken from the manifest; give the column split by hand")
    taken, parts = _fraction(share, most)
    if abs(taken / parts - share) > _NEAR:
        log.warning(
            "%d of %d parts are the split %s, where %g was asked for: the rarest class has %d %ss",
            taken, parts, target, share, most, by,
        )  # fmt: skip
    moved = {rows[index] for part in divide(there, parts, seed, by)[:taken] for index in part}
    return [replace(record, split=target) if i in moved else record for i, record in enumerate(records)]


def folds(
    records: Sequence[SlideRecord], n: int, *, seed: int = 0, validation: float = 0.2, by: By = "patient"
) -> list[list[SlideRecord]]:
    """The records n times, each time with another part of them held out.

    Parts are about equal, keep patients whole (with `by="site"` whole sites, so that no model is tested on a site
    that it was trained on) and classes in proportion. Each slide is held out exactly once.

    Where the manifest has no split, or none but train, the part held out is `test`, and `val` is taken from the
    rest. Where it has slides with the split test, those stay test in every fold: they judge the model in the end,
    and the part held out is `val`. A split val of the manifest is divided anew, like train.

    Args:
        records: The slides. Classes are told apart by `label`: for other kinds of target put a stratum there.
        n: How many folds; 2 or more.
        seed: Which slides come together. The same seed gives the same folds.
        validation: Share of the slides not held out that become `val`, where the held-out part is `test`.
        by: What is never divided.

    Returns:
        For each fold all records, in their order, each with its split.

    Raises:
        UserError: There are too few patients of a class, or too few sites.
    """
    if n < 2:
        raise UserError(f"{n} folds were asked for; cross-validation needs 2 or more")
    check_leakage([replace(record, split=_kept(record)) for record in records])
    free = [place for place, record in enumerate(records) if record.split != "test"]
    held = "val" if len(free) < len(records) else "test"
    result = []
    for number, part in enumerate(divide([records[place] for place in free], n, seed, by)):
        out = {free[index] for index in part}
        fold = [
            replace(record, split="test" if record.split == "test" else held if place in out else "train")
            for place, record in enumerate(records)
        ]
        result.append(complete_splits(fold, validation, 0.0, seed + number, by))
    return result


def _kept(record: SlideRecord) -> str:
    """Keep `test`; train and val are divided anew."""
    return "test" if record.split == "test" else "train"


def write_folds(folder: Path, divided: Sequence[Sequence[SlideRecord]]) -> list[Path]:
    """Write `fold0.csv`, `fold1.csv` and so on: manifests of their own, with every split filled in."""
    paths = [folder / f"fold{number}.csv" for number in range(len(divided))]
    for path, records in zip(paths, divided):
        check_leakage(records)
        write_manifest(path, records)
    return paths


def read_splits(path: Path, columns: Sequence[str] = (), filled: bool = False) -> list[SlideRecord]:
    """Read splits that were saved, and check them again: someone may have edited the file.

    Args:
        path: A file of `write_manifest` or `write_folds`.
        columns: The columns with the label.
        filled: Whether none of these may be empty.

    Raises:
        UserError: A slide has no split, or a patient is in two.
    """
    records = read_manifest(path, labelled=bool(columns), columns=columns, filled=filled)
    empty = [record.slide for record in records if not record.split]
    if empty:
        raise UserError(f"{path}: slide {empty[0]} has no split; write train, val or test")
    try:
        check_leakage(records)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return records


def changes_since(
    kept: Sequence[SlideRecord], now: Sequence[SlideRecord], columns: Sequence[str], covariates: Sequence[str] = ()
) -> list[str]:
    """Differences of a manifest from the slides that a run keeps, a sentence for each kind of change.

    Args:
        kept: The slides of the run.
        now: The slides that the manifest lists.
        columns: The columns with the label.
        covariates: The columns that a model takes beside the slide.
    """
    before, after = ({record.slide: record for record in some} for some in (kept, now))
    both = [(before[slide], after[slide]) for slide in before if slide in after]
    labels = [column for column in columns if column not in PATHS]

    def changed(columns: Sequence[str]) -> list[str]:
        return [one.slide for one, two in both if any(one.cells.get(c) != two.cells.get(c) for c in columns)]

    moved = [one.slide for one, two in both if two.split and one.split != two.split]
    said = {
        "new in the manifest since the run began, left out": [slide for slide in after if slide not in before],
        "no longer in the manifest, kept by the run": [slide for slide in before if slide not in after],
        "with another label in the manifest; the run keeps the label it began with": changed(labels),
        "with other covariates in the manifest; the run keeps those it began with": changed(covariates),
        "in another split in the manifest; the run keeps the split it began with": moved,
    }
    return [
        f"{len(slides)} slide{'' if len(slides) == 1 else 's'} {text}: {first_names(slides)}"
        for text, slides in said.items()
        if slides
    ]


def first_names(slides: Sequence[str], most: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(slides[:most]) + (f" and {len(slides) - most} more" if len(slides) > most else "")


YES, NO = "true", "false"


def apply_splits(records: Sequence[SlideRecord], path: Path, fold: int) -> list[SlideRecord]:
    """The records with the splits of a file; whether a patient is in two of them is checked where splits are completed.

    Args:
        records: The slides; their names without extension are those of the file.
        path: CLAM's splits_0.csv or splits_0_bool.csv, a table of Patho-Bench such as k=all.tsv, or STAMP's
            splits.json, which has patients.
        fold: Which, where the file has several.

    Raises:
        UserError: The file is none of these, lacks a slide, or has one in two splits.
    """
    by_patient = path.suffix == ".json"
    known = patients_of_stamp(path, fold) if by_patient else published_splits(path, fold)
    found, left, what = [], dict(known), "patient" if by_patient else "slide"
    for record in records:
        slides = (record.slide, *(name for one in record.called for name in spellings(one)))
        name = next((name for name in ((same_patient(record.patient),) if by_patient else slides) if name in known), "")
        if not name or (name not in left and not by_patient):
            called = record.patient if by_patient else record.slide
            raise UserError(f"{path} lacks {what} {called}; leave it out of the manifest, or give its split")
        found.append(replace(record, split=known[name]))
        left.pop(name, None)
    if left:
        log.warning(
            "%s has %d %ss that the manifest lacks, the first is %s", path, len(left), what, clean(next(iter(left)))
        )
    return found


def patients_of_stamp(path: Path, fold: int = 0) -> dict[str, str]:
    """The split of each patient of STAMP's splits.json, by one spelling of each."""
    content = read_json(path)
    folds = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(folds, list) or not all(isinstance(one, dict) for one in folds):
        raise UserError(f"{path} is no file of splits: it has no list splits, as STAMP's splits.json")
    if not 0 <= fold < len(folds):
        raise UserError(f"{path} has {len(folds)} folds, and data.fold is {fold}; they count from 0")
    found: dict[str, str] = {}
    for split in ("train", "test"):
        for patient in folds[fold].get(f"{split}_patients", []):
            if found.setdefault(same_patient(str(patient)), split) != split:
                raise UserError(f"{path}, fold {fold}: patient {patient} is in train and in test")
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
