"""Which slides a user means: a folder, a pattern, one file, or a manifest CSV."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wsi_trainer.errors import UserError
from wsi_trainer.tables import Table, micrometres, read_table

from .convert import Job
from .readers import dicom, omezarr, openslide, tiff

# Files with these names are meant to be slides: where they cannot be read, that is worth a report.
_SLIDE_NAMES = {
    ".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".tif", ".tiff", ".btf", ".vms", ".vmu", ".svslide", ".dcm",
    ".czi",
}  # fmt: skip


@dataclass(frozen=True)
class Listed:
    """A slide and the line of the manifest that names it."""

    job: Job
    columns: Mapping[str, str] = field(default_factory=dict)


def list_slides(slides: str) -> list[Listed]:
    """All slides that `slides` means, in a stable order.

    Raises:
        UserError: There is nothing, or the manifest is wrong.
    """
    path = Path(slides)
    if path.is_file() and path.suffix.lower() == ".csv":
        listed = _from_manifest(path)
    else:
        found = _from_folder(path) if path.is_dir() and not _is_slide_folder(path) else _from_pattern(slides)
        root = path if path.is_dir() else None
        names = _names(found, root)
        listed = [Listed(Job(slide, name)) for slide, name in zip(found, names)]
    if not listed:
        raise UserError(f"{slides}: no slide there; give a folder, a file, a quoted pattern or a manifest CSV")
    return listed


def _from_pattern(pattern: str) -> list[Path]:
    path = Path(pattern)
    return [path] if path.exists() else sorted(Path(match) for match in glob.glob(pattern, recursive=True))


def _from_folder(folder: Path) -> list[Path]:
    return sorted(_walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    data_of_mrxs = {entry.stem for entry in entries if entry.suffix.lower() == ".mrxs"}
    for entry in entries:
        if entry.is_dir():
            if _is_slide_folder(entry):
                yield entry
            elif entry.name not in data_of_mrxs:
                yield from _walk(entry)
        elif entry.suffix.lower() in _SLIDE_NAMES or _is_slide(entry):
            yield entry


def _is_slide_folder(folder: Path) -> bool:
    return omezarr.claims(folder, b"") or dicom.claims(folder, b"")


def _is_slide(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(16)
        return tiff.claims(file, head) or openslide.claims(file, head)
    except OSError:
        return False


def plain_name(slide: Path) -> str:
    """The name of a slide without its extension, however long that is."""
    name = slide.name
    for ending in (".ome.tiff", ".ome.tif", ".ome.zarr"):
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return slide.stem


def _names(slides: Sequence[Path], root: Path | None) -> list[str]:
    """A different name for each slide, the same on every run; a folder's structure is kept."""
    folders = [slide.parent.relative_to(root) if root else Path() for slide in slides]
    short = [(folder / plain_name(slide)).as_posix() for folder, slide in zip(folders, slides)]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else (folder / slide.name).as_posix()
        for name, folder, slide in zip(short, folders, slides)
    ]
    again = [name for name, count in Counter(names).items() if count > 1]
    if again:
        raise UserError(f"several slides are named {again[0]}; rename them, or convert them to several folders")
    return names


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
            for index, name in zip(group, _names(places, root)):
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
