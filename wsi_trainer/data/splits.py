"""Which slides train, which choose the checkpoint, which are only looked at in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError


def complete_splits(
    records: Sequence[SlideRecord], validation: float = 0.2, test: float = 0.2, seed: int = 0
) -> list[SlideRecord]:
    """Fill in the split of each record that has none.

    A manifest without splits is divided into test, val and train. One that has a split for each slide but
    no val gives up part of its train slides for it. A patient never appears in two splits, and classes are
    kept in proportion.
    """
    unset = [record for record in records if not record.split]
    if unset and len(unset) != len(records):
        raise UserError(
            f"{len(unset)} of {len(records)} slides have no split, the first is {unset[0].slide}; "
            "give a split to every slide or to none"
        )
    result = list(records)
    if unset:
        result = _move(result, "", "test", test, seed)
        result = [replace(record, split=record.split or "train") for record in result]
    if not any(record.split == "val" for record in result):
        share = validation / max(1 - test, 1e-9) if unset else validation
        result = _move(result, "train", "val", share, seed)
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


def _move(records: Sequence[SlideRecord], source: str, target: str, share: float, seed: int) -> list[SlideRecord]:
    """Move about this share of one split to another, whole patients, classes in proportion."""
    rows = [index for index, record in enumerate(records) if record.split == source]
    if share <= 0 or not rows:
        return list(records)
    labels = [records[index].label for index in rows]
    patients = [records[index].patient for index in rows]
    smallest = min(len({p for p, label in zip(patients, labels, strict=True) if label == name}) for name in set(labels))
    folds = min(max(2, round(1 / share)), smallest)
    if folds < 2:
        raise UserError(
            f"a class has a single patient, so no {target} split can be taken from the manifest; "
            "give the column split by hand"
        )
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    _, taken = next(splitter.split(np.zeros(len(rows)), labels, patients))
    moved = {rows[index] for index in taken}
    return [replace(record, split=target) if i in moved else record for i, record in enumerate(records)]
