"""Compare a tag with the version and the changelog, and print the notes of the release.

    python .ci/release.py v1.0.0 > notes.md

It ends with exit code 1, and says why, where the tag is not that of the version, where the changelog has no dated
section of it, or where lines still stand under "Unreleased".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, package: str, changelog: str) -> str:
    """The section of a version in the changelog."""
    (version,) = re.findall(r'^__version__ = "([^"]+)"', package, re.MULTILINE)
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag} and the version of wsi_trainer/__init__.py is {version}")
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL))
    if re.search(r"^- ", sections.get("Unreleased", ""), re.MULTILINE):
        raise SystemExit(f'CHANGELOG.md still has lines under "Unreleased"; give them the heading "{version} (date)"')
    for title, text in sections.items():
        if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", title):
            return text.strip() + "\n"
    raise SystemExit(f"CHANGELOG.md has no section with the heading {version} and a date")


if __name__ == "__main__":
    package, changelog = (ROOT / name for name in ("wsi_trainer/__init__.py", "CHANGELOG.md"))
    print(notes(sys.argv[1], package.read_text(encoding="utf-8"), changelog.read_text(encoding="utf-8")), end="")
