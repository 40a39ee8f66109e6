"""Which slides a user means: a folder, a pattern, one file, or a manifest CSV."""

from __future__ import annotations

import csv
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wsi_trainer.errors import UserError

from .convert import Job
from .names import different_names
from .readers import omezarr
from .readers.dicom_series import is_dicom
from .walk import Note, Walk


@dataclass(frozen=True)
class Listed:
    """A slide and the line of the manifest that names it."""

    job: Job
    columns: Mapping[str, str] = field(default_factory=dict)


def list_slides(slides: str, out: Path | None = None, note: Note = lambda text: None) -> list[Listed]:
    """All slides that `slides` means, in a stable order.

    Args:
        slides: What the user gave.
        out: The output folder, which is never input.
        note: Told in one line each what is there and not taken.

    Raises:
        UserError: There is nothing, or the manifest is wrong.
    """
    path = Path(slides)
    if path.is_file() and path.suffix.lower() == ".csv":
        listed = _from_manifest(path)
    else:
        walk = Walk(out, note)
        is_folder = path.is_dir() and not omezarr.claims(path, b"")
        found = walk.slides(path) if is_folder else _from_pattern(slides, walk)
        names = different_names(found, path if is_folder else None)
        listed = [Listed(Job(slide, name)) for slide, name in zip(found, names)]
    if not listed:
        raise UserError(f"{slides}: no slide there; give a folder, a file, a quoted pattern or a manifest CSV")
    return listed


def _from_pattern(pattern: str, walk: Walk) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        if walk.is_made(path, path.parent):
            raise UserError(f"{path} is in the output folder, and preprocess wrote it; choose another output folder")
        return [path]
    found: list[Path] = []
    dicoms: list[Path] = []
    matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    data_of_mrxs = {match.with_suffix("") for match in matches if match.suffix.lower() == ".mrxs"}
    for match in matches:
        if match.is_dir():
            if omezarr.claims(match, b""):
                found += [] if walk.is_made(match, match.parent) else [match]
            elif match not in data_of_mrxs:
                found += walk.slides(match)
        else:
            (dicoms if is_dicom(match) else found).append(match)
    return sorted(dict.fromkeys([*found, *walk.series(dicoms, None)]))


def _from_manifest(path: Path) -> list[Listed]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if "slide" not in (reader.fieldnames or []):
            raise UserError(f"{path}: no column slide; it has {', '.join(reader.fieldnames or []) or 'none'}")
        rows = list(reader)
    slides = [path.parent / row["slide"] for row in rows]
    names = different_names(slides, None)
    return [
        Listed(Job(slide, name, _mpp(path, line, row)), row)
        for line, (slide, name, row) in enumerate(zip(slides, names, rows), start=2)
    ]


def _mpp(path: Path, line: int, row: Mapping[str, str]) -> float | None:
    text = (row.get("mpp") or "").strip()
    try:
        return float(text) if text else None
    except ValueError as error:
        raise UserError(f"{path}, line {line}: mpp is {text!r}; expected micrometres per pixel") from error


def part_of(listed: Sequence[Listed], shard: str | None) -> list[Listed]:
    """The slides of one job of an array: `2/5` is the second of five parts."""
    if shard is None:
        return list(listed)
    try:
        number, _, count = shard.partition("/")
        i, n = int(number), int(count)
    except ValueError as error:
        raise UserError(f"--shard {shard}: expected i/n, such as 1/8") from error
    if not 1 <= i <= n:
        raise UserError(f"--shard {shard}: expected i from 1 to {n}")
    return list(listed[i - 1 :: n])
