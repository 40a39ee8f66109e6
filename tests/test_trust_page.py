"""The page on trust says what runs have counted, says what was not run, and names tests that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import exactness_page, trust_page

ROOT = Path(__file__).resolve().parents[1]

COLUMNS = ("command", "kind", "calls", "sites", "sites tried", "injected", "right", "recovered", "defects")
FOUND: dict[str, Any] = {
    "faults": {
        "rows": [
            dict(zip(COLUMNS, ("fit", "write|ENOSPC", 7, 5, 4, 14, 4, 9, 1), strict=True)),
            dict(zip(COLUMNS, ("verify", "read", 5, 3, 3, 10, 0, 10, 0), strict=True)),
        ],
        "defects_found": [{"what": "a disk that was full", "test": "tests/test_trust_page.py::test_named_tests_exist"}],
        "reached": [{"command": "fit", "sites": 9, "reached": 6}],
        "notes": ["of links, one"],
    },
    "state_machine_fit": {
        "sequences": 11, "steps": 120, "kills": 13, "damages": 14, "concurrent": 15, "disagreements": 0,
        "defects_found": [],
    },
    "mutants": {
        "tool": "a tool",
        "rows": [{"file": "rules/a.py", "mutants": 30, "killed": 27, "timeout": 1, "survived": 1, "excused": 1}],
        "excused": [{"mutant": "a < b", "why": "they are the same"}], "survived": ["c"],
    },
}  # fmt: skip


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page says of these results."""
    monkeypatch.setattr(trust_page, "PAGE", tmp_path / "trust.md")
    monkeypatch.setattr(trust_page, "FIGURES", tmp_path)
    for module in (exactness_page, trust_page):
        monkeypatch.setattr(module, "RESULTS", tmp_path)

    def write(results: dict[str, Any]) -> dict[str, str]:
        for name, values in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "values": values}))
        _, *parts = trust_page.write_page().read_text().split("\n## ")
        return {part.split("\n")[0]: part for part in parts}

    return write


def test_what_was_counted_is_said(page: Any) -> None:
    said = page(FOUND)
    faults = said["Faults, one at a time"]
    assert "| fit | write\\|ENOSPC | 7 | 5 | 4 | 14 | 4 | 9 | 1 |" in faults and "- of links, one" in faults
    assert "| **all** |  | 12 | 8 | 7 | 24 | 4 | 19 | 1 |" in faults
    assert "| fit | 9 | 6 |" in faults
    assert "| fit and resume | 11 | 120 | 13 | 14 | 15 | 0 |" in said["Random sequences against a model"]
    assert "| rules/a.py | 30 | 27 | 1 | 1 | 1 |" in said["Mutants"]
    assert "- excused: a < b, they are the same" in said["Mutants"] and "- survived: c" in said["Mutants"]
    listed = said["Defects found by this"]
    assert "| faults | a disk that was full | `tests/test_trust_page.py::test_named_tests_exist` |" in listed
    assert all(one["what"] in listed for one in json.loads(trust_page.LISTED.read_text()))


def test_what_was_not_run_is_said(page: Any) -> None:
    said = page({})
    for title in ("Faults, one at a time", "Changed files", "Ten thousand slides", "A long training", "Mutants"):
        assert trust_page.NOT_RUN in said[title]
    assert said["Random sequences against a model"].count("not run") == len(trust_page.MACHINES)
    assert said["Kills and damages"].count("not run") == 5


def test_named_tests_exist() -> None:
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:def|class) (test_\w+|Test\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for by, what, tests in trust_page.all_defects():
        named = set(re.findall(r"\b(?:test_|Test)\w+(?!\w*\.py|/)", tests))
        assert named & there or any((ROOT / file).is_file() for file in re.findall(r"[\w/]+\.py", tests)), (by, what)
        for name in re.findall(r"::(\w+)", tests):
            assert name in there, f"{by}: {what}: there is no {name}"
