"""Cross-validation: the same slides divided n times, and each division kept as a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wsi_trainer.data.manifest import PATHS, SlideRecord, read_manifest, write_manifest
from wsi_trainer.data.splits import By, check_leakage, complete_splits, divide
from wsi_trainer.errors import UserError


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
    """What of the manifest's split stays: only test; the rest is divided anew."""
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


def changes_since(kept: Sequence[SlideRecord], now: Sequence[SlideRecord], columns: Sequence[str]) -> list[str]:
    """Differences of a manifest from the slides that a run keeps, a sentence for each kind of change.

    Args:
        kept: The slides of the run.
        now: The slides that the manifest lists.
        columns: The columns with the label.
    """
    before, after = ({record.slide: record for record in some} for some in (kept, now))
    both = [(before[slide], after[slide]) for slide in before if slide in after]
    labels = [column for column in columns if column not in PATHS]
    relabelled = [one.slide for one, two in both if any(one.cells.get(c) != two.cells.get(c) for c in labels)]
    moved = [one.slide for one, two in both if two.split and one.split != two.split]
    said = {
        "new in the manifest since the run began, left out": [slide for slide in after if slide not in before],
        "no longer in the manifest, kept by the run": [slide for slide in before if slide not in after],
        "with another label in the manifest; the run keeps the label it began with": relabelled,
        "in another split in the manifest; the run keeps the split it began with": moved,
    }
    return [f"{_counted(slides)} {text}: {first_names(slides)}" for text, slides in said.items() if slides]


def _counted(slides: Sequence[str]) -> str:
    return "1 slide" if len(slides) == 1 else f"{len(slides)} slides"


def first_names(slides: Sequence[str], most: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(slides[:most]) + (f" and {len(slides) - most} more" if len(slides) > most else "")


def describe(records: Sequence[SlideRecord]) -> dict[str, dict[str, int]]:
    """How many slides and patients each split has, and how many slides of each class."""
    found: dict[str, dict[str, int]] = {}
    for split in ("train", "val", "test"):
        some = [record for record in records if record.split == split]
        classes = Counter(record.label for record in some)
        counts = {"slides": len(some), "patients": len({record.patient for record in some})}
        found[split] = counts | {f"label {name}": classes[name] for name in sorted(classes)}
    return found
