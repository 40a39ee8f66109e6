"""docs/seeds.md and README.md say what the results say: figures of cases, counts of verdicts, the last score."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.score import FILE
from benchmarks.seeds import figures

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "seeds.md"


def test_each_case_is_on_the_page_as_it_was_measured() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = figures()
    assert found
    assert not {case: said for case, said in found.items() if said not in text}


def test_verdicts_are_counted() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| ") and line.count("|") == 7]
    verdicts = [v for v in rows if v not in ("verdict", "---")]
    assert len(verdicts) == 28
    counted = re.findall(r"^\| \*\*([a-z ]+)\*\*.*\| (\d+) \|$", text, re.MULTILINE)
    stated = {name: int(count) for name, count in counted}
    kinds = {"beaten": ("beaten", "equalled"), "planned": ("planned",), "not reached": ("not reached",)}
    kinds["not shown"] = ("not shown",)
    assert stated == {name: sum(v.startswith(words) for v in verdicts) for name, words in kinds.items()}


def test_readme_has_the_last_score() -> None:
    run = json.loads(FILE.read_text())["runs"][-1]
    said = f"at {run['side']}², in a quarter of what plain PyTorch holds for backward, a step of six networks takes"
    assert (
        f"{said} {run['time']:.2f} of its time and {run['memory']:.2f} of its process's"
        in (ROOT / "README.md").read_text()
    )
