"""Which slides a user means: a folder, a pattern, one file, or a manifest CSV."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wsi_trainer.errors import UserError
from wsi_trainer.tables import Table, micrometres, read_table

from .convert import Job
from .names import different_names, plain_name
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
    if is_table(slides):
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


def is_table(slides: str) -> bool:
    """Whether the user means the slides that a table lists."""
    return Path(slides).is_file() and Path(slides).suffix.lower() == ".csv"


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
    table = read_table(path)
    table.need("slide")
    for line, row in table.rows:
        if not row["slide"].strip():
            raise UserError(f"{path}, line {line}: the column 'slide' is empty")
    rows = [row for _, row in table.rows]
    slides = [path.parent / (row.get("path", "").strip() or row["slide"].strip()) for row in rows]
    _refuse_twice(path, table, slides)
    return [
        Listed(Job(slide, name, micrometres(row.get("mpp", ""), f"{path}, line {line}")), row)
        for slide, name, (line, row) in zip(slides, _names_by_folder(slides), table.rows)
    ]


def _refuse_twice(path: Path, table: Table, slides: Sequence[Path]) -> None:
    lines: dict[str, int] = {}
    for (line, row), slide in zip(table.rows, slides):
        first = lines.setdefault(os.path.normpath(slide), line)
        if first != line:
            raise UserError(f"{path}, line {line}: slide {row['slide']} is in line {first} already")


def _names_by_folder(slides: Sequence[Path]) -> list[str]:
    """The names of slides that may lie anywhere: those that would be the same get the folders in which they differ."""
    names = [plain_name(slide) for slide in slides]
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    for group in groups.values():
        if len(group) > 1:
            places = [Path(os.path.abspath(slides[index])) for index in group]
            root = Path(os.path.commonpath([place.parent for place in places]))
            for index, name in zip(group, different_names(places, root)):
                names[index] = name
    return names


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


def check_outlines(path: Path | None, slides: int) -> None:
    """Refuse one file of outlines for several slides."""
    if path is not None and path.is_file() and slides > 1:
        raise UserError(f"--geojson {path} is one file for {slides} slides; give a folder with one for each")
