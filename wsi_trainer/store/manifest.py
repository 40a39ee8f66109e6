"""Records of the files of a store: a journal while it is made, and then a manifest with the hash of every file.

Journal: one line of JSON for each finished shard, written after the shard itself is safe on disk. The first line says
of which source and with which settings; a journal of others is of no use.

Manifest: zarr reads an absent file as background. The manifest tells a deleted shard from an empty one.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from wsi_trainer.errors import SlideError
from wsi_trainer.io.files import replace_file, sha256_of
from wsi_trainer.io.untrusted import json_of, read_json, read_text
from wsi_trainer.slide.geometry import PROVENANCE


@dataclass(frozen=True)
class Entry:
    """One finished shard: its file's size and hash, or neither where the shard is absent."""

    key: str
    size: int = 0
    sha256: str | None = None


class Journal:
    """The journal of one store under construction. Use as a context manager."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._header = json.loads(json.dumps(header))
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self.entries: dict[str, Entry] = {}
        self.matches = self._load()

    def _load(self) -> bool:
        """Reads what is there; False if there is nothing that fits the header."""
        try:
            lines = read_text(self._path).splitlines(keepends=True)
        except FileNotFoundError:
            return False
        # A line that was being written when the process died has no end.
        complete = [line for line in lines if line.endswith("\n")]
        try:
            records = [json_of(line, self._path) for line in complete]
        except ValueError:
            return False
        if not records or records[0] != self._header:
            return False
        self.entries = {record["key"]: Entry(**record) for record in records[1:]}
        return True

    def __enter__(self) -> Journal:
        """Opens the journal for writing; begins a new one unless the old one fits."""
        # Rewritten whole: an unfinished last line would spoil the next one.
        lines = [self._header, *map(asdict, self.entries.values())]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        replace_file(self._path, text.encode())
        self._file = self._path.open("a")
        return self

    def add(self, entry: Entry) -> None:
        """Notes a finished shard. Safe to call from several threads."""
        assert self._file is not None, "a context manager"
        with self._lock:
            self.entries[entry.key] = entry
            self._file.write(json.dumps(asdict(entry)) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


NAME = "manifest.json"


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a store."""

    store: Path
    file: str
    reason: str


def _serialise(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest, with their hash among them: the same content gives the same bytes."""
    return (json.dumps({"sha256": _seal(content), **content}, indent=1, sort_keys=True) + "\n").encode()


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(store: Path, settings: Mapping[str, Any], known: Mapping[str, Entry]) -> None:
    """Writes the manifest of a finished store; files whose hash is known are not read again."""
    files = {}
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        key = path.relative_to(store).as_posix()
        if key == NAME or key.endswith(".part"):
            continue
        entry = known.get(key)
        files[key] = {
            "size": entry.size if entry else path.stat().st_size,
            "sha256": entry.sha256 if entry else sha256_of(path),
        }
    replace_file(store / NAME, _serialise({"settings": dict(settings), "files": files}))


def read_manifest(store: Path) -> dict[str, Any]:
    """The content of a manifest.

    Raises:
        ValueError: It is missing or was changed.
    """
    try:
        record = read_json(store / NAME)
        seal, files = record.pop("sha256"), record["files"]
    except FileNotFoundError as error:
        raise ValueError("the manifest is missing") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"the manifest is damaged: {error}") from error
    if not isinstance(files, dict) or _seal(record) != seal:
        raise ValueError("the manifest is damaged: its own hash does not match")
    for key, entry in files.items():
        if not _is_inside(key):
            raise ValueError(f"the manifest is damaged: it lists {key!r}, which is not inside the store")
        if not (
            isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        ):
            raise ValueError(f"the manifest is damaged: its entry for {key!r} has no size and hash")
    return dict(record)


def _is_inside(key: str) -> bool:
    """True if a key names a file below the store, however it is read."""
    parts = key.split("/")
    return all(parts) and not {".", ".."} & set(parts) and not {"\\", ":"} & set(key)


def check_file(path: Path, size: int, sha256: str) -> str | None:
    """The damage of one file, or None."""
    if not path.is_file():
        return "missing"
    found = path.stat().st_size
    if found != size:
        return f"truncated: {found} of {size} bytes" if found < size else f"grown: {found} instead of {size} bytes"
    return None if sha256_of(path) == sha256 else "changed: its hash does not match"


def find_damage(store: Path) -> Iterator[Damage]:
    """Everything in which a store differs from its manifest."""
    try:
        content = read_manifest(store)
    except ValueError as error:
        yield Damage(store, NAME, str(error))
        return
    files = content["files"]
    for key, expected in files.items():
        reason = check_file(store / key, expected["size"], expected["sha256"])
        if reason:
            yield Damage(store, key, reason)
    present = {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}
    for key in sorted(present - files.keys() - {NAME}):
        yield Damage(store, key, "not in the manifest")


_METADATA = "zarr.json"
_OTHERS = "labels/zarr.json"
"""Names the labels of a store; nothing here reads it, and other programs add theirs to it."""


def check_complete(store: Path) -> Set[str] | None:
    """The files that a store of this package lists, all of which are there; None for a store of others.

    Each has the size that was written, which tells a shard or a mask of another store, and the metadata have their
    hash: what they say is not checked by any chunk, and a smaller height would be believed.

    Raises:
        SlideError: The manifest is missing or damaged, or lists a file that is not there or another one.
    """
    if not (store / NAME).is_file() and not _is_ours(store):
        return None
    way_out = "copy the store again, or remove it and convert the slide again"
    try:
        files: dict[str, dict[str, Any]] = read_manifest(store)["files"]
    except ValueError as error:
        raise SlideError(store, f"damaged: {error}; {way_out}") from error
    sizes = files_of(store)
    missing = sorted(files.keys() - sizes.keys())
    if missing:
        more = f" and {len(missing) - 1} more of its files are" if len(missing) > 1 else " is"
        raise SlideError(store, f"damaged: {missing[0]}{more} missing; {way_out}")
    for key, entry in files.items():
        changed = sizes[key] != entry["size"] or key.endswith(_METADATA)
        if changed and key != _OTHERS and (reason := check_file(store / key, entry["size"], entry["sha256"])):
            raise SlideError(store, f"damaged: {key}: {reason}; {way_out}")
    return files.keys()


def files_of(store: Path, inside: str = "") -> dict[str, int]:
    """The size of each file of a store, by the name that its manifest gives it."""
    found: dict[str, int] = {}
    for entry in os.scandir(store / inside):
        if entry.is_dir(follow_symlinks=False):
            found |= files_of(store, f"{inside}{entry.name}/")
        elif entry.is_file():
            found[inside + entry.name] = entry.stat().st_size
    return found


def shards_of(files: Set[str], level: int) -> frozenset[tuple[int, int]]:
    """Rows and columns of the shards of a level among the files of a store."""
    prefix = f"{level}/c/0/"
    cells = [key.removeprefix(prefix).split("/") for key in files if key.startswith(prefix)]
    return frozenset((int(row), int(column)) for row, column in cells)


def _is_ours(store: Path) -> bool:
    try:
        content = read_json(store / "zarr.json")
        return PROVENANCE in content["attributes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
