"""Docstrings are reStructuredText, since Markdown's own marks would end `make docs`, and begin with a noun or a
verb."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@cache
def docstrings(path: Path) -> list[tuple[int, str]]:
    """Those of a file, with the lines on which they begin."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    found = [(node.body[0].lineno, ast.get_docstring(node)) for node in nodes if node.body]
    return [(line, text) for line, text in found if text is not None]


@pytest.mark.parametrize("package", ["lightning_plugin", "wsi_trainer"])
def test_no_docstring_holds_a_table_or_a_heading_of_markdown(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {row.strip()}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in docstrings(path)
        for row in text.splitlines()
        if row.lstrip().startswith(("|", "# ", "## "))
    ]
    assert not found, "\n".join(found)


QUESTIONS = ("What", "Where", "How", "Whether", "Which")


@pytest.mark.parametrize("package", ["lightning_plugin", "wsi_trainer"])
def test_a_docstring_begins_with_a_noun_or_a_verb(package: str) -> None:
    """A question word in its place names nothing."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        comments = [
            (i, row.strip().removeprefix("#: "))
            for i, row in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if row.strip().startswith("#: ")
        ]
        for line, text in (*docstrings(path), *comments):
            if text.split()[0].strip(",:;") in QUESTIONS:
                found.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)
