"""An invariant is explained once, in a note, and referred to: whoever follows a reference finds the note there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [path for package in ("lightning_plugin", "wsi_trainer") for path in sorted((ROOT / package).rglob("*.py"))]
REFERENCE = re.compile(r"\[Note: ([^]]+)\]\s+in\s+`([\w.]+)`")
#: A note begins its paragraph, in a docstring or a comment.
BEGINS = re.compile(r"^(?:\s*\"\"\"|#:? |\s*)\[Note: ([^]]+)\] [A-Z]", re.MULTILINE)


def notes(path: Path) -> set[str]:
    return {" ".join(name.split()) for name in BEGINS.findall(path.read_text())}


def places(path: Path, module: str) -> Iterator[Path]:
    """The files that a module's name may mean in a file: from its package, its folder, or the one above."""
    package = ROOT / path.relative_to(ROOT).parts[0]
    for start in (package, path.parent, path.parent.parent):
        yield start / f"{module.replace('.', '/')}.py"
        yield start / module.replace(".", "/") / "__init__.py"


def wrong(path: Path) -> Iterator[str]:
    """The references of a file that lead nowhere."""
    for name, module in REFERENCE.findall(path.read_text()):
        found = [there for there in places(path, module) if there.is_file()]
        if not any(" ".join(name.split()) in notes(there) for there in found):
            yield f"{path.relative_to(ROOT)}: [Note: {name}] in `{module}`"


def test_a_note_is_where_a_reference_says() -> None:
    assert not [said for path in FILES for said in wrong(path)]


def test_every_note_is_explained_once() -> None:
    explained = [name for path in FILES for name in notes(path)]
    asked = {" ".join(name.split()) for path in FILES for name in re.findall(r"\[Note: ([^]]+)\]", path.read_text())}
    assert sorted(explained) == sorted(asked)
