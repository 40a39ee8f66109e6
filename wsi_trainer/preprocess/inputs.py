"""Slides that a user means by a folder, a pattern, one file, or a manifest CSV; what is left out is named."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wsi_trainer.errors import UserError
from wsi_trainer.io.tables import Table, micrometres, read_table
from wsi_trainer.slide.formats import PICTURE_ENDINGS, SLIDE_ENDINGS, omezarr, openslide, tiff
from wsi_trainer.slide.formats.dicom import all_series, is_dicom, read_instance
from wsi_trainer.slide.names import SlideFolders, different_names, same_path, slide_name
from wsi_trainer.store.convert import ASSOCIATED, NGFF04, STAGING, THUMBNAILS, Job
from wsi_trainer.store.manifest import NAME as MANIFEST

# What `preprocess` puts into its output folder beside the stores.
_MADE = {THUMBNAILS, ASSOCIATED, NGFF04}

Note = Callable[[str], None]


class SlideFinder:
    """Looks for slides.

    Args:
        out: The output folder, which is never input.
        note: Told what is left out, in one line each.
    """

    def __init__(self, out: Path | None, note: Note) -> None:
        self._out = out.resolve() if out is not None else None
        self._note = note
        self._seen: set[tuple[int, int]] = set()
        self._pictures: list[Path] = []
        self._made = 0

    def slides(self, folder: Path) -> list[Path]:
        """All slides in a folder and those below it."""
        found = self._all(folder)
        if self._made:
            self._note(f"{folder}: {self._made} stores that preprocess wrote to the output folder are left out")
        if not found:
            return sorted(self._pictures)
        if self._pictures:
            self._note(
                f"{folder}: {len(self._pictures)} pictures beside the slides are left out, such as "
                f'{min(self._pictures)}; name them with a pattern such as "{folder}/*{self._pictures[0].suffix}"'
            )
        return sorted(found)

    def _all(self, folder: Path) -> list[Path]:
        found: list[Path] = []
        folders = [folder]
        while folders:  # real folders first, so that a slide is known by its own place and not by a link to it
            links: list[Path] = []
            for path in folders:
                found += self._visit(path, folder, links)
            folders = links
        return found

    def _visit(self, folder: Path, root: Path, links: list[Path]) -> Iterator[Path]:
        is_root = folder == root
        if not self._is_new(folder):
            return
        is_output = (folder / STAGING).is_dir()
        if not is_root and is_output:
            if folder.resolve() != self._out:
                self._note(f"{folder}: what an earlier preprocess wrote there is left out; name that folder to take it")
            return
        if not is_root and folder.resolve() == self._out:
            return
        entries = self._not_hidden(folder, _entries(folder))
        data_of_mrxs = {entry.stem for entry in entries if entry.suffix.lower() == ".mrxs"}
        files: list[Path] = []
        dicoms: list[Path] = []
        for entry in entries:
            if entry.is_dir():
                if omezarr.claims(entry, b""):
                    if self.is_made(entry, root):
                        self._made += 1
                    else:
                        yield entry
                elif entry.name in data_of_mrxs or (is_output and entry.name in _MADE):
                    continue
                elif entry.is_symlink():
                    links.append(entry)
                else:
                    yield from self._visit(entry, root, links)
            elif self._is_file(entry):
                (dicoms if _is_dicom(entry) else files).append(entry)
        yield from self.series(dicoms, folder)
        yield from self._files(files)

    def _not_hidden(self, folder: Path, entries: list[Path]) -> list[Path]:
        hidden = [entry for entry in entries if entry.name.startswith(".")]
        slides = [entry for entry in hidden if _is_slide_name(entry) and not entry.is_dir()]
        if slides:
            self._note(f"{folder}: {len(slides)} hidden files are left out, such as {slides[0].name}")
        return [entry for entry in entries if entry not in hidden]

    def _is_new(self, folder: Path) -> bool:
        """True for a folder that was not searched yet: links may lead to it again."""
        found = folder.stat()
        key = (found.st_dev, found.st_ino)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _is_file(self, entry: Path) -> bool:
        """True for a file, and for a link to one or to nothing; reading a pipe would wait for ever."""
        try:
            mode = entry.stat().st_mode
        except OSError:
            return _is_slide_name(entry)  # a dangling link: opening it says what is wrong
        if stat.S_ISREG(mode):
            return True
        self._note(f"{entry}: left out, it is a pipe, a socket or a device and not a file")
        return False

    def _files(self, files: Iterable[Path]) -> Iterator[Path]:
        for file in files:
            if _is_slide_name(file) or self._is_slide(file):
                yield file
            elif file.suffix.lower() in PICTURE_ENDINGS:
                self._pictures.append(file)

    def _is_slide(self, file: Path) -> bool:
        """True for a file that begins as slides do, whatever its name."""
        try:
            with file.open("rb") as stream:
                head = stream.read(16)
            return tiff.claims(file, head) or openslide.claims(file, head)
        except OSError as error:
            self._note(f"{file}: left out, since it cannot be read ({error.strerror}) and its name is not a slide's")
            return False

    def series(self, files: list[Path], folder: Path | None) -> Iterator[Path]:
        """A path for each series among DICOM files.

        A series is known by its folder where that holds no other one, else by the file of its finest level.
        """
        found = all_series(files)
        whole = folder is not None and len(found) == 1
        for series in found:
            yield folder if whole and folder is not None else series.first
        if len(found) > 1:
            place = folder if folder is not None else found[0].first.parent
            self._note(f"{place}: {len(found)} DICOM series, each a slide of its own")
        foreign = []
        for file in files:
            instance = read_instance(file)
            if instance is None:
                yield file  # damaged: opening it says how
            elif not instance.is_slide and not instance.is_directory:
                foreign.append(f"{file.name} is {instance.kind}")
        if foreign:
            self._note(f"{len(foreign)} DICOM files that are no slides are left out: {foreign[0]}")

    def is_made(self, store: Path, root: Path) -> bool:
        """True for a store that preprocess would make of itself: it lies where its own result would."""
        if self._out is None or not (store / MANIFEST).is_file():
            return False
        return store.resolve() == (self._out / store.relative_to(root)).resolve()


def _is_slide_name(file: Path) -> bool:
    return file.name.lower().endswith(SLIDE_ENDINGS)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be searched for slides: {error.strerror}") from error


def _is_dicom(file: Path) -> bool:
    try:
        return os.path.isfile(file) and is_dicom(file)
    except OSError:  # said when it is looked at as another slide
        return False


@dataclass(frozen=True)
class Listed:
    """A slide and the line of the manifest that names it."""

    job: Job
    columns: Mapping[str, str] = field(default_factory=dict)


def list_slides(slides: str, out: Path | None = None, note: Note = lambda text: None) -> list[Listed]:
    """All slides that `slides` means, in a stable order.

    Args:
        slides: A folder, a file, a pattern or a table, as the user gave it.
        out: The output folder, which is never input.
        note: Told in one line each what is there and not taken.

    Raises:
        UserError: There is nothing, or the manifest is wrong.
    """
    path = Path(slides)
    if is_table(slides):
        listed = _from_manifest(path)
    else:
        finder = SlideFinder(out, note)
        is_folder = path.is_dir() and not omezarr.claims(path, b"")
        found = finder.slides(path) if is_folder else _from_pattern(slides, finder)
        names = different_names(found, path if is_folder else None)
        listed = [Listed(Job(slide, name)) for slide, name in zip(found, names)]
    if not listed:
        raise UserError(f"{slides}: no slide there; give a folder, a file, a quoted pattern or a manifest CSV")
    return listed


def is_table(slides: str) -> bool:
    """True if the user gave a table of slides."""
    return Path(slides).is_file() and Path(slides).suffix.lower() == ".csv"


def _from_pattern(pattern: str, finder: SlideFinder) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        if finder.is_made(path, path.parent):
            raise UserError(f"{path} is in the output folder, and preprocess wrote it; choose another output folder")
        return [path]
    found: list[Path] = []
    dicoms: list[Path] = []
    matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    data_of_mrxs = {match.with_suffix("") for match in matches if match.suffix.lower() == ".mrxs"}
    for match in matches:
        if match.is_dir():
            if omezarr.claims(match, b""):
                found += [] if finder.is_made(match, match.parent) else [match]
            elif match not in data_of_mrxs:
                found += finder.slides(match)
        else:
            (dicoms if is_dicom(match) else found).append(match)
    return sorted(dict.fromkeys([*found, *finder.series(dicoms, None)]))


def _from_manifest(path: Path) -> list[Listed]:
    table = read_table(path)
    table.need("slide")
    for line, row in table.rows:
        if not row["slide"].strip():
            raise UserError(f"{path}, line {line}: the column 'slide' is empty")
    rows = [row for _, row in table.rows]
    folders = SlideFolders()
    slides = [folders.find(path.parent / (row.get("path", "").strip() or row["slide"].strip())) for row in rows]
    _refuse_twice(path, table, slides)
    return [
        Listed(Job(slide, name, micrometres(row.get("mpp", ""), f"{path}, line {line}")), row)
        for slide, name, (line, row) in zip(slides, _names_by_folder(slides), table.rows)
    ]


def _refuse_twice(path: Path, table: Table, slides: Sequence[Path]) -> None:
    lines: dict[str, int] = {}
    for (line, row), slide in zip(table.rows, slides):
        first = lines.setdefault(same_path(slide), line)
        if first != line:
            raise UserError(f"{path}, line {line}: slide {row['slide']} is in line {first} already")


def _names_by_folder(slides: Sequence[Path]) -> list[str]:
    """The names of slides that may lie anywhere: those that would be the same get the folders in which they differ."""
    names = [slide_name(slide) for slide in slides]
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
