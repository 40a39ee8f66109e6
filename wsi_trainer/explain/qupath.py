"""The script that loads a run's maps into QuPath."""

from __future__ import annotations

from pathlib import Path

NAME = "qupath.groovy"
_BLANK = "new File(FOLDER)"


def write_script(folder: Path) -> Path:
    """Put the script beside heatmaps.json, which it reads; it knows its folder, which QuPath would not tell it."""
    script = Path(__file__).with_name(NAME).read_text(encoding="utf-8")
    path = folder / NAME
    path.write_text(script.replace(_BLANK, f"new File({_quoted(str(folder.resolve()))})"), encoding="utf-8")
    return path


def _quoted(text: str) -> str:
    """A string of Groovy; in single quotes a dollar is a dollar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
