"""Identity of a slide: a hash that its file, the stores and the features made from it share, under any name.

The hash is of the size and three pieces of each file, so that a folder of slides is compared in seconds. Stores and
features keep it. Stores and runs of 1.0 know a hash of all bytes instead: where one of these meets a file, that is read
whole.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from wsi_trainer.errors import SlideError
from wsi_trainer.io.arrays import open_hdf5, own
from wsi_trainer.io.untrusted import Unreadable, read_json, what_is
from wsi_trainer.slide.formats import dicom, omezarr
from wsi_trainer.slide.geometry import PROVENANCE
from wsi_trainer.store.manifest import NAME

log = logging.getLogger("wsi_trainer")

_PIECE = 1 << 20
HASH = "slide_hash"
"""The attribute of a file of features that holds the hash of its slide."""


def source_files(path: Path) -> list[Path]:
    """All files of a slide: a store's, a DICOM series', and the folder of data beside an MRXS file."""
    if not omezarr.claims(path, b"") and dicom.claims(path, b""):
        return dicom.files_of(path)
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.suffix.lower() == ".mrxs" and path.with_suffix("").is_dir():
        return [path, *source_files(path.with_suffix(""))]
    return [path]


def source_bytes(path: Path) -> int:
    """The size of all files of a slide."""
    return sum(file.stat().st_size for file in source_files(path))


@dataclass(frozen=True)
class SlideId:
    """The hashes by which a slide is known again; empty where nobody knows them."""

    hash: str = ""
    """Of the slide's file: a store or features have that of the file that they were made from."""
    sha256: str = ""
    """Of all bytes of that file, as stores keep it; of a file by itself it is computed when it is asked for."""
    content: str = ""
    """Of what is read: a store's, or that of a file of features, changes when it is made anew with other settings."""
    file: Path | None = field(default=None, compare=False)
    """The slide's file, where it is known."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Identify a slide by its file or store; nothing is known of one that is absent."""
        if not path.exists():
            return cls()
        if not (path / NAME).is_file():
            found = _hash(path)
            return cls(found, "", found, path)
        try:
            content = str(read_json(path / NAME)["sha256"])
            source = read_json(path / "zarr.json")["attributes"][PROVENANCE]["source"]
            return cls(str(source.get("hash", "")), str(source["sha256"]), content)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise SlideError(path, f"is damaged, or no store of ours: {error}; see `wsi-train verify`") from error

    def with_features(self, path: Path | None) -> Self:
        """The same slide, of which a file of features is read, which may be absent."""
        if path is None:
            return replace(self, content="")
        return replace(self, hash=self.hash or _noted_in(path), content=_hash(path))

    @classmethod
    def read(cls, record: Mapping[str, str], file: Path) -> Self:
        """The hashes that a run keeps of a slide, also one of 1.0."""
        content, source = record["content"], record.get("source")
        if source is None:
            return cls(record["hash"], record["sha256"], content, file)
        return cls(source, "", content, file) if source == content else cls("", source, content, file)

    def record(self) -> dict[str, str]:
        """Entries that a run keeps."""
        return {"hash": self.hash, "sha256": self.sha256, "content": self.content}

    @cached_property
    def whole(self) -> str:
        """The hash of all bytes, computed where it is not known and the file is still the one that was hashed."""
        if self.sha256 or not self.hash or self.file is None or not self.file.exists():
            return self.sha256
        _tell_reading()
        return full_hash(self.file) if _hash(self.file) == self.hash else ""

    def is_comparable(self, other: SlideId) -> bool:
        """True where hashes tell whether two slides are one."""
        return bool(self.hash and other.hash) or bool(self.whole and other.whole)


class KnownSlides:
    """Names of slides by their hashes. The first name of a slide counts."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._not_whole: list[tuple[str, SlideId]] = []
        self._lacks_hash = False

    def add(self, name: str, slide: SlideId) -> None:
        """Know a slide under a name."""
        for key in filter(None, (slide.content, slide.hash, slide.sha256)):
            self._names.setdefault(key, name)
        if slide.hash and not slide.sha256:
            self._not_whole.append((name, slide))
        self._lacks_hash |= bool(slide.sha256 and not slide.hash)

    def find(self, slide: SlideId) -> str | None:
        """The name of a slide; None where no known one has its hashes."""
        for key in (slide.content, slide.hash, slide.sha256):
            if key and key in self._names:
                return self._names[key]
        if slide.hash:
            return self._names.get(slide.whole) if self._lacks_hash else None
        while slide.sha256 and self._not_whole:
            name, other = self._not_whole.pop()
            if other.whole:
                self._names.setdefault(other.whole, name)
        return self._names.get(slide.sha256)


@cache
def _tell_reading() -> None:
    log.warning(
        "slides are compared with stores of version 1.0, which know no hash but that of all bytes: files are read "
        "whole, which takes a while; with stores that are made anew it does not"
    )


def attributes_of(features: Path) -> dict[str, str]:
    """Attributes of a file of features: `embed` writes checksums there, and other programs do not.

    Raises:
        Unreadable: It is no HDF5, or is damaged.
    """
    with open_hdf5(features) as file:
        rows = own(features, file, "features")
        found = file.attrs if "feats" in file else {} if rows is None else rows.attrs
        return {str(name): str(value) for name, value in found.items()}


def _noted_in(features: Path) -> str:
    try:
        return attributes_of(features).get(HASH, "") if features.suffix == ".h5" else ""
    except Unreadable:  # whoever reads the features says so
        return ""


def same_header(header: object, now: Mapping[str, Any], slide: Path) -> bool:
    """True if the header of a store or mask is `now`, or what 1.0 would have written, with a hash of the name too."""
    return header == now or header == {**now, "source": hash_of_1_0(slide)}


def hash_of_1_0(slide: Path) -> str:
    """The hash by which 1.0 told whether stores, masks and features were made from a file; renaming changed it."""
    return _hash(slide, named=True)


def _hash(path: Path, named: bool = False) -> str:
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
