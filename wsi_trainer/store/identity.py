"""Identity of a slide: its files, the hashes of these, and its name."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.untrusted import read_json, what_is
from wsi_trainer.slide.formats import dicom, omezarr
from wsi_trainer.slide.geometry import PROVENANCE
from wsi_trainer.store.manifest import NAME

_PIECE = 1 << 20


def source_files(path: Path) -> list[Path]:
    """All files of a slide: a store's, a DICOM series', and the folder of data beside an MRXS file."""
    if not omezarr.claims(path, b"") and dicom.claims(path, b""):
        return dicom.files_of(path)
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.suffix.lower() == ".mrxs" and path.with_suffix("").is_dir():
        return [path, *source_files(path.with_suffix(""))]
    return [path]


def quick_hash(path: Path) -> str:
    """A hash of size, name, beginning, middle and end of each file: tells versions apart at once."""
    return _hash_of_pieces(path, named=True)


@dataclass(frozen=True)
class Fingerprint:
    """Checksums by which a slide is known again, whatever it is called; both empty where there is no file."""

    content: str
    """Checksum of the file itself: a store's changes when it is made anew with other settings."""
    source: str
    """Checksum of the slide that a store was made from; of another file the same as `content`."""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of a slide or a store. Of a store its records are read, of others three pieces of each file."""
    if not path.exists():
        return Fingerprint("", "")
    if (path / NAME).is_file():
        try:
            content = str(read_json(path / NAME)["sha256"])
            attributes = read_json(path / "zarr.json")["attributes"]
            return Fingerprint(content, str(attributes[PROVENANCE]["source"]["sha256"]))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise SlideError(path, f"is damaged, or no store of ours: {error}; see `wsi-train verify`") from error
    content = _hash_of_pieces(path, named=False)
    return Fingerprint(content, content)


def _hash_of_pieces(path: Path, named: bool) -> str:
    seal = hashlib.sha256()
    for file in _checked(path):
        size = file.stat().st_size
        seal.update(f"{f'{file.name}:' if named else ''}{size};".encode())
        with file.open("rb") as stream:
            # A set and not a list: its order is in the hashes of all stores that were ever made, and a test pins it.
            for start in {0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)}:
                stream.seek(start)
                seal.update(stream.read(_PIECE))
    return seal.hexdigest()


def full_hash(path: Path) -> str:
    """A hash of all bytes: the file's own, or one over those of several files in order of their names."""
    files = _checked(path)
    seals = []
    for file in files:
        with file.open("rb") as stream:
            seals.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return seals[0] if len(seals) == 1 else hashlib.sha256("".join(seals).encode()).hexdigest()


def source_bytes(path: Path) -> int:
    """The size of all files of a slide."""
    return sum(file.stat().st_size for file in source_files(path))


def _checked(path: Path) -> list[Path]:
    try:
        files = source_files(path)
    except OSError as error:
        raise SlideError(path, f"cannot be read: {error.strerror}") from error
    if not files:
        raise SlideError(path, "holds no file")
    for file in files:
        if kind := what_is(file):  # reading a pipe waits for ever
            raise SlideError(path, f"is {kind} and not a file")
    return files


def plain_name(slide: Path) -> str:
    """The name of a slide without its extension, however long that is."""
    name = slide.name if slide.name not in ("", "..") else slide.resolve().name  # "." and ".." are folders, too
    is_series = slide.is_dir() and not omezarr.claims(slide, b"")  # the name of such a folder has no extension
    return name if is_series else without_extension(name)


def without_extension(name: str) -> str:
    """The name of a file, or its path, without the extension."""
    for ending in (".ome.tiff", ".ome.tif", ".ome.zarr"):
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return name.removesuffix(Path(name).suffix)


def different_names(slides: Sequence[Path], root: Path | None) -> list[str]:
    """A different name for each slide, the same on every run; a folder's structure is kept."""
    folders = [slide.parent.relative_to(root) if root and slide != root else Path() for slide in slides]
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


LONGEST = 180
"""Bytes of the name of a result; a file system takes 255, endings included."""
_ENDING = re.compile(r"(\.ome)?\.[A-Za-z][A-Za-z0-9]{1,5}$")


def result_names(slides: Sequence[str]) -> dict[str, str]:
    """The names of the files about each slide: its own without folder and ending, with a checksum where two are equal.

    Args:
        slides: The slides as a manifest calls them, each another one.
    """
    short = {slide: _ENDING.sub("", Path(slide).name) or Path(slide).name for slide in slides}
    cut = {slide: name.encode()[:LONGEST].decode(errors="ignore") for slide, name in short.items()}
    counts = Counter(name.casefold() for name in cut.values())
    names = {}
    for slide, name in cut.items():
        alone = counts[name.casefold()] == 1 and name == short[slide]
        names[slide] = name if alone else f"{name}-{hashlib.sha256(slide.encode()).hexdigest()[:8]}"
    return names
