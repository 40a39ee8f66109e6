"""Files of the application that have a pattern, for tests that a fact has one owner."""

from __future__ import annotations

import re
from pathlib import Path

CODE = Path(__file__).resolve().parents[2] / "wsi_trainer"


def files_with(pattern: str, *suffixes: str) -> set[str]:
    """Return the files with one of the suffixes whose text has the pattern."""
    paths = (path for suffix in suffixes or (".py",) for path in CODE.rglob(f"*{suffix}"))
    return {path.relative_to(CODE).as_posix() for path in paths if re.search(pattern, path.read_text("utf-8"))}
