"""The user's cache folder: what was measured or planned once, kept for later processes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from platformdirs import user_cache_path

#: Names another folder; where it is set and empty, nothing is kept.
VARIABLE = "LIGHTNING_PLUGIN_CACHE"
#: Of a file: recipes of a deep network have some megabytes.
MOST_BYTES = 1 << 28
#: Names of what is being written begin so, and none is written for so many seconds.
PARTIAL, LONG = "partial-", 3600.0
#: Errors of reading, or of using, a text that was damaged.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


def folder() -> Path | None:
    """The folder of the user's cache; None if nothing is to be kept."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    return user_cache_path("lightning_plugin", appauthor=False)


def read(path: Path) -> str:
    """The text of a file of the cache.

    Raises:
        ValueError: It is no file, or larger than any that is written here.
    """
    if not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return data.decode("utf-8")


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_half_written(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=PARTIAL, delete=False, encoding="utf-8") as file:
        name = Path(file.name)
        try:
            file.write(text)
            file.close()
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


def remove_half_written(folder: Path) -> None:
    """Remove files that processes left half written when they were killed."""
    for path in folder.glob(f"{PARTIAL}*"):
        if written_at(path) < time.time() - LONG:
            path.unlink(missing_ok=True)


def written_at(path: Path) -> float:
    """The time at which a file was written; long ago, if another process has removed it meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
