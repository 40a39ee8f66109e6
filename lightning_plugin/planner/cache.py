"""The user's cache folder: what was measured or planned once, kept for later processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

#: Names another folder; where it is set and empty, nothing is kept.
VARIABLE = "LIGHTNING_PLUGIN_CACHE"


def folder() -> Path | None:
    """Where files are kept, if they are to be."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    return user_cache_path("lightning_plugin", appauthor=False)


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
