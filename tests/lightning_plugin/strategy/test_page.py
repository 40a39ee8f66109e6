"""The page that says which test stands for which part of Lightning names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "how-to" / "lightning-features.md"


def test_every_test_that_the_page_names_exists() -> None:
    known = {name for file in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    files = {file.name for file in HERE.glob("test_*.py")}
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:test_\w+\.py::)?(test_\w+)`", page))
    assert len(named) > 30 and named <= known, named - known
    assert set(re.findall(r"`(test_\w+\.py)", page)) <= files
