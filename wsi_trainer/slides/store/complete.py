"""Whether all files of a store are there. zarr reads an absent one as background, so a hole would go unnoticed.

One listing of the folders and one reading of the manifest and of the metadata; `verify` reads the pixels' files, too.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from wsi_trainer.foreign import read_json

from ..errors import SlideError
from .manifest import NAME, check_file, read_manifest
from .metadata import PROVENANCE

_METADATA = "zarr.json"
_OTHERS = "labels/zarr.json"
"""Names the labels of a store; nothing here reads it, and other programs add theirs to it."""


def check_complete(store: Path) -> Set[str] | None:
    """The files that a store of this package lists, all of which are there; None for a store of others.

    The metadata are as they were written, too: what they say is not checked by any chunk, and a smaller height would
    be believed.

    Raises:
        SlideError: The manifest is missing or damaged, lists a file that is not there, or other metadata.
    """
    if not (store / NAME).is_file() and not _is_ours(store):
        return None
    way_out = "copy the store again, or remove it and convert the slide again"
    try:
        manifest = read_manifest(store)
    except ValueError as error:
        raise SlideError(store, f"damaged: {error}; {way_out}") from error
    files: dict[str, dict[str, Any]] = manifest["files"]
    if manifest.get("settings", {}).get("header", {}).get("codec") == "jpeg":
        raise SlideError(store, "stored as JPEG by --codec jpeg, which is no longer read; convert the slide again")
    missing = sorted(files.keys() - files_of(store))
    if missing:
        more = f" and {len(missing) - 1} more of its files are" if len(missing) > 1 else " is"
        raise SlideError(store, f"damaged: {missing[0]}{more} missing; {way_out}")
    for key, entry in files.items():
        described = key.endswith(_METADATA) and key != _OTHERS
        if described and (reason := check_file(store / key, entry["size"], entry["sha256"])):
            raise SlideError(store, f"damaged: {key}: {reason}; {way_out}")
    return files.keys()


def files_of(store: Path) -> set[str]:
    """The files of a store, as its manifest names them."""
    found: set[str] = set()
    prefix = len(str(store)) + 1
    for folder, _, names in os.walk(store):
        inside = folder[prefix:].replace(os.sep, "/")
        found.update(f"{inside}/{name}" if inside else name for name in names)
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
