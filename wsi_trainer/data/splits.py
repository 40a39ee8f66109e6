"""Splits: slides that train, that choose the checkpoint, and that are only looked at in the end."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from wsi_trainer.data.iterative import divide_marked
from wsi_trainer.data.manifest import SlideRecord, one_spelling
from wsi_trainer.errors import UserError

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
        known = one_spelling(record.patient for record in records)
        return [known[record.patient] for record in records]
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
