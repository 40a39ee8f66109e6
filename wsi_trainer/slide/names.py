"""Names of slides: what a slide is called, which files belong to it, and which spellings are one.

The name of a slide is that of its file, without folders and without an ending that readers know. What follows another
dot stays: `TCGA-05-4244-01Z-00-DX1.d4ff32cd` is a name, and CLAM and TCGA write it without the ending.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.slide.formats import PICTURE_ENDINGS, SLIDE_ENDINGS

_KNOWN = "|".join(re.escape(ending) for ending in (*SLIDE_ENDINGS, *PICTURE_ENDINGS, ".zarr"))
_ENDING = re.compile(rf"(?<=[^/\\])(\.ome)?({_KNOWN})$", re.IGNORECASE)


def without_ending(path: str) -> str:
    """The path of a slide without its ending."""
    return _ENDING.sub("", path)


def slide_name(slide: str | Path) -> str:
    """The name of a slide, of its file or its path."""
    path = Path(slide)
    whole = path.name if path.name not in ("", "..") else path.resolve().name  # "." and ".." are folders, too
    return without_ending(whole)


def spellings(slide: str | Path) -> list[str]:
    """The names under which tables and programs write of a slide: `a`, `a.ome` and `a.ome.tif` for `a.ome.tif`.

    A name that looks as if it had an ending has two: `b.ndpi` of `b.ndpi.tif` is also `b`.
    """
    whole = Path(slide).name
    ending = _ENDING.search(whole)
    half = whole if ending is None else whole.removesuffix(ending[2])
    return list(dict.fromkeys((slide_name(slide), half, whole)))


def file_about(
    folder: Path, slides: Iterable[str | Path], kinds: Iterable[str] = ("{}.geojson",), key: str | None = None
) -> tuple[str, Path] | None:
    """The file of a folder that belongs to a slide, and its kind; none where nothing of that name is there.

    Args:
        folder: The folder.
        slides: What the slide is called: its cell in the manifest and its path.
        kinds: Names of the file, with `{}` for that of the slide.
        key: The option or the key that needs the file; without it there may be none.

    Raises:
        SlideError: There are several, or none where one is needed.
    """
    slides = list(slides)
    names = dict.fromkeys(name for slide in slides for name in spellings(slide))
    wanted = {kind.format(name): kind for name in names for kind in kinds}
    there = [(kind, folder / name) for name, kind in wanted.items() if (folder / name).is_file()]
    if not there and not all(map(str.isascii, wanted)) and folder.is_dir():
        by_letters = {letters(name): kind for name, kind in wanted.items()}
        found = sorted(entry.name for entry in os.scandir(folder) if letters(entry.name) in by_letters)
        there = [(by_letters[letters(name)], folder / name) for name in found]
    if len(there) > 1:
        files = " and ".join(path.name for _, path in there)
        raise SlideError(slides[-1], f"{folder} has {files}; leave one of them there")
    if not there and key is not None:
        expected = ", ".join(dict.fromkeys(kind.format(slide_name(slide)) for slide in slides for kind in kinds))
        raise SlideError(slides[-1], f"{key} has none of {expected} in {folder}")
    return there[0] if there else None


class SlideFolders:
    """Finds the files of slides that a table names, with or without their endings; each folder is listed once."""

    def __init__(self) -> None:
        self._listed: dict[Path, dict[str, list[str]]] = {}

    def find(self, path: Path) -> Path:
        """The file that is there under this name; the path itself where there is none.

        Raises:
            UserError: Several files have the name, and other endings.
        """
        if path.exists() and not _is_data_of_mrxs(path):
            return path
        there = self._names(path.parent).get(letters(path.name), [])
        # Pictures beside a slide show it, and are it only where there is nothing else.
        found = [name for name in there if not name.lower().endswith(PICTURE_ENDINGS)] or there
        if len(found) > 1:
            raise UserError(f"slide {path} may be {' or '.join(sorted(found))}; write its ending into the table")
        return path.with_name(found[0]) if found else path

    def _names(self, folder: Path) -> dict[str, list[str]]:
        if folder not in self._listed:
            names: dict[str, list[str]] = {}
            for entry in os.scandir(folder) if folder.is_dir() else ():
                for name in {entry.name, without_ending(entry.name)} if not _is_data_of_mrxs(Path(entry)) else ():
                    names.setdefault(letters(name), []).append(entry.name)
            self._listed[folder] = names
        return self._listed[folder]


def _is_data_of_mrxs(path: Path) -> bool:
    """True for the folder with the pixels of a slide, which has the name of the file beside it."""
    return path.is_dir() and path.with_name(f"{path.name}.mrxs").is_file()


def different_names(slides: Sequence[Path], root: Path | None) -> list[str]:
    """A different name for each slide, the same on every run; a folder's structure is kept."""
    folders = [slide.parent.relative_to(root) if root and slide != root else Path() for slide in slides]
    short = [(folder / slide_name(slide)).as_posix() for folder, slide in zip(folders, slides)]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else (folder / slide.name).as_posix()
        for name, folder, slide in zip(short, folders, slides)
    ]
    again = [name for name, count in Counter(names).items() if count > 1]
    if again:
        raise UserError(f"several slides are named {again[0]}; rename them, or convert them to several folders")
    return names


LONGEST = 180
"""Bytes of the name of a result; a file system takes 255, endings included."""


def result_names(slides: Sequence[str]) -> dict[str, str]:
    """The names of the files about each slide: its own, with a checksum where two are equal or one is too long.

    Args:
        slides: The slides as a manifest calls them, each another one.
    """
    short = {slide: slide_name(slide) for slide in slides}
    cut = {slide: name.encode()[:LONGEST].decode(errors="ignore") for slide, name in short.items()}
    counts = Counter(name.casefold() for name in cut.values())
    names = {}
    for slide, name in cut.items():
        alone = counts[name.casefold()] == 1 and name == short[slide]
        names[slide] = name if alone else f"{name}-{hashlib.sha256(slide.encode()).hexdigest()[:8]}"
    return names


# Spellings.


def letters(text: str) -> str:
    """The same text for an umlaut that is one letter and for one that is two, as a Mac writes it."""
    return unicodedata.normalize("NFC", text)


def same_path(path: str | Path) -> str:
    """One text for all spellings of a path: relative or not, through links, with the letters of a Mac."""
    return letters(os.path.realpath(path))


def same_patient(patient: str) -> str:
    """One text for all spellings of a patient: of `3`, `3.0` and `00003`, and of `P3` and `p3`."""
    whole = re.sub(r"^(\d+)\.0+$", r"\1", letters(patient.strip()))
    return re.sub(r"\d+", lambda digits: digits[0].lstrip("0") or "0", whole).casefold()
