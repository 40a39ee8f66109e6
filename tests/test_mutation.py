"""The search for changes that no test notices: what it runs, in which order, and what it leaves out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.mutation import excused
from tests.mutation.mutants import _difference, _meaning
from tests.mutation.places import ENGINE, ROOT, changed_files
from tests.mutation.tests import Reach
from tests.mutation.trial import Changed

BOXES = "lightning_plugin/boxes.py"


def line_of(text: str) -> int:
    lines = (ROOT / BOXES).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_what_is_excused_is_there() -> None:
    for entry in excused.table()["line"]:
        lines = map(str.strip, (ROOT / ENGINE / entry["file"]).read_text().splitlines())
        assert entry["before"] in lines, f"{entry['file']} has no such line any more: {entry['before']}"
        assert entry["why"] and entry.get("after") != entry["before"]


def test_one_change_is_excused_and_no_other() -> None:
    before, after = "@dataclass(frozen=True, slots=True)", "@dataclass(frozen=False, slots=True)"
    assert excused.why(BOXES, before, after)
    assert excused.why(BOXES, before, "@dataclass(frozen=True, slots=False)") is None
    assert excused.why(BOXES, "zip(a, b, strict=True)", "zip(b, a, strict=False)") is None


def test_a_module_is_imported_from_the_changed_source() -> None:
    source = (ROOT / BOXES).read_text().replace("max(0, ", "max(1, ") + "\nCHANGED = True\n"
    finder = Changed(BOXES, source)
    spec = finder.find_spec("lightning_plugin.boxes")
    assert spec is not None and spec.loader is finder and finder.find_spec("lightning_plugin.layout") is None
    assert compile(source, "", "exec") and "CHANGED" in finder.get_code(spec.name).co_names
    assert spec.origin == str(ROOT / BOXES)
    assert importlib.util.module_from_spec(spec).__file__ == str(ROOT / BOXES)


@pytest.mark.parametrize(
    ("before", "after", "line", "was", "is_now"),
    [
        ("a = 1\nb = 2\n", "a = 1\nb = 3\n", 2, "b = 2", "b = 3"),
        ("a = 1\n\n@cache\ndef f():\n    pass\n", "a = 1\ndef f():\n    pass\n", 3, "@cache", "(removed)"),
    ],
)
def test_a_change_is_told_by_its_line(before: str, after: str, line: int, was: str, is_now: str) -> None:
    assert _difference(before, after) == (line, was, is_now)


def test_annotations_mean_nothing_to_a_run() -> None:
    assert _meaning("def f(a: int | None) -> int: ...") == _meaning("def f(a: int & None) -> str: ...")
    assert _meaning("def f(a=1): ...") != _meaning("def f(a=2): ...")
    assert _meaning("def f(:") is None


def test_tests_of_a_line_in_their_order(tmp_path: Path) -> None:
    """Those about its file first; of each function one before any second; of a line that runs at import all."""
    body, header = line_of("count *= c"), line_of("def telling(")
    inside = line_of("middle = count // 2")
    records = [
        ("tests/test_a.py::test_slow[1]", 3.0, [body]),
        ("tests/test_a.py::test_slow[2]", 2.0, [body, inside]),
        ("tests/test_a.py::test_quick", 1.0, [body]),
        ("tests/test_boxes.py::test_own", 9.0, [body]),
        ("tests/test_b.py::test_other", 0.1, []),
        ("tests/test_b.py::test_fails", 0.1, [body]),
    ]
    path = tmp_path / "reach.jsonl"
    path.write_text("".join(
        json.dumps({"test": test, "seconds": seconds, "passed": "fails" not in test, "lines": {BOXES: lines}}) + "\n"
        for test, seconds, lines in records
    ))  # fmt: skip
    reach = Reach(path)

    def names(line: int) -> list[str]:
        return [test.name.partition("::test_")[2] for test in reach.tests(BOXES, line)]

    assert names(body) == ["own", "quick", "slow[2]", "slow[1]"]
    assert names(header) == ["slow[2]"], "what is said of a function is used where it runs"
    assert names(line_of("import itertools")) == ["own", "quick", "slow[2]", "slow[1]"]
    assert names(line_of("a box needs as many")) == [], "no test reaches it"


def test_all_that_is_changed_is_there() -> None:
    files = changed_files()
    assert {BOXES, "lightning_plugin/planner/search/search.py", "lightning_plugin/rules/window.py"} <= set(files)
