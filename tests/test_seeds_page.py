"""docs/seeds.md says what the results say: each figure of a case, and as many verdicts of each kind as there are."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.seeds import figures

PAGE = Path(__file__).parents[1] / "docs" / "seeds.md"


def test_each_case_is_on_the_page_as_it_was_measured() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = figures()
    assert found
    assert not {case: said for case, said in found.items() if said not in text}


def test_verdicts_are_counted() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| ") and line.count("|") == 5]
    verdicts = [v for v in rows if v not in ("verdict", "---")]
    assert len(verdicts) == 28
    counted = re.findall(r"^\| \*\*([a-z ]+)\*\*.*\| (\d+) \|$", text, re.MULTILINE)
    stated = {name: int(count) for name, count in counted}
    kinds = {"beaten": ("beaten", "equalled"), "planned": ("planned",), "not reached": ("not reached",)}
    kinds["not shown"] = ("not shown",)
    assert stated == {name: sum(v.startswith(words) for v in verdicts) for name, words in kinds.items()}
