"""The slides in a folder and those below it: each once, and nothing that is there passed over without a word."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from wsi_trainer.errors import UserError

from .associated import FOLDER as ASSOCIATED
from .convert import STAGING, THUMBNAILS
from .readers import omezarr, openslide, picture, tiff
from .readers.dicom_series import all_series, is_dicom, read_instance
from .store.manifest import NAME as MANIFEST

# Files with these names are meant to be slides: where they cannot be read, that is worth a report.
_SLIDE_NAMES = (
    ".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".tif", ".tiff", ".btf", ".vms", ".vmu", ".svslide", ".dcm",
    ".czi", ".zarr.zip", ".ozx",
)  # fmt: skip
# What `preprocess` puts into its output folder beside the stores.
_MADE = {THUMBNAILS, ASSOCIATED, "ngff-0.4"}

Note = Callable[[str], None]


class Walk:
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
        """Whether a folder was not looked through yet: links may lead to it again."""
        found = folder.stat()
        key = (found.st_dev, found.st_ino)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _is_file(self, entry: Path) -> bool:
        """Whether an entry is a file, or a link to one or to nothing; a pipe would be waited for without an end."""
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
            elif file.suffix.lower() in picture.SUFFIXES:
                self._pictures.append(file)

    def _is_slide(self, file: Path) -> bool:
        """Whether a file begins as slides do, whatever its name."""
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
        """Whether a store is what preprocess makes of a slide at its place, so that it would be its own source."""
        if self._out is None or not (store / MANIFEST).is_file():
            return False
        return store.resolve() == (self._out / store.relative_to(root)).resolve()


def _is_slide_name(file: Path) -> bool:
    return file.name.lower().endswith(_SLIDE_NAMES)


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
