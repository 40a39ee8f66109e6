"""The manifest of a store: the size and hash of every file in it, and a hash of the manifest itself.

zarr reads an absent file as background. The manifest is what tells a deleted shard from an empty one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsi_trainer.foreign import read_bytes, read_json

from .files import replace_file
from .journal import Entry

NAME = "manifest.json"


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a store."""

    store: Path
    file: str
    reason: str


def sha256_of(path: Path) -> str:
    """The hash of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """Whether a key names a file below the store, however it is read."""
    parts = key.split("/")
    return all(parts) and not {".", ".."} & set(parts) and not {"\\", ":"} & set(key)


def check_file(path: Path, size: int, sha256: str) -> str | None:
    """What is wrong with one file, or None."""
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
    if read_bytes(store / NAME) != _serialise(content):  # the same content in other bytes
        yield Damage(store, NAME, "the manifest is damaged: it is not written as it was")
    files = content["files"]
    for key, expected in files.items():
        reason = check_file(store / key, expected["size"], expected["sha256"])
        if reason:
            yield Damage(store, key, reason)
    present = {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}
    for key in sorted(present - files.keys() - {NAME}):
        yield Damage(store, key, "not in the manifest")
