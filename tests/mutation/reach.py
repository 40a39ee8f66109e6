"""Which lines each test reaches, and how long it takes: one line of JSON a test, so that what is interrupted goes on.

Seen is what runs in the tests' own process; what a test does in processes of its own is not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.mutation.places import ENGINE, ROOT, changed_files

#: Quick ones first: what is known of few tests is of use already.
TESTS = ("rules", "program", "planner", "", "execute", "strategy")


class Watcher:
    """A pytest plugin that looks at each test alone, and leaves out those that are known."""

    def __init__(self, file: TextIO, known: set[str]) -> None:
        import coverage

        self.file, self.known = file, known
        include = [str(ROOT / name) for name in changed_files()]
        self.coverage = coverage.Coverage(data_file=None, include=include, config_file=False)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.known and not item.get_closest_marker("gpu")]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.passed = True
        self.coverage.erase()
        self.coverage.start()
        began = time.monotonic()
        try:
            result = yield
        finally:
            seconds = time.monotonic() - began
            self.coverage.stop()
        data = self.coverage.get_data()
        files = {str(Path(name).relative_to(ROOT)): sorted(data.lines(name) or ()) for name in data.measured_files()}
        record = {"test": item.nodeid, "seconds": round(seconds, 3), "passed": self.passed, "lines": files}
        self.file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self.file.flush()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed = self.passed and report.passed


def watch(path: Path, parts: Sequence[str]) -> None:
    """Run the engine's tests that the file does not know yet, and add them to it."""
    known = {json.loads(line)["test"] for line in path.open()} if path.is_file() else set()
    folder = ROOT / "tests" / ENGINE
    with path.open("a") as file:
        for part in parts:
            tests = [folder / part] if part else sorted(folder.glob("test_*.py"))
            pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *map(str, tests)], [Watcher(file, known)])


if __name__ == "__main__":
    import sys

    watch(Path(sys.argv[1]), sys.argv[2:] or TESTS)
