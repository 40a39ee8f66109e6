"""Which tests are run on a mutant, and in which order."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

from tests.mutation.places import ROOT


@dataclass(frozen=True)
class Test:
    """A test, and the seconds that it took."""

    __test__ = False

    name: str
    seconds: float

    def about(self, file: str) -> bool:
        """Whether it is in a file that is named after another, or nearly so."""
        return Path(file).stem[:-1] in Path(self.name.partition("::")[0]).stem


class Reach:
    """Which tests reach which lines, as `reach` has seen it."""

    def __init__(self, path: Path) -> None:
        self.lines: dict[str, dict[int, list[Test]]] = defaultdict(lambda: defaultdict(list))
        self.files: dict[str, list[Test]] = defaultdict(list)
        self.all: list[Test] = []
        for record in map(json.loads, path.open()):
            if record["passed"]:
                test = Test(record["test"], record["seconds"])
                self.all.append(test)
                for file, lines in record["lines"].items():
                    if lines:
                        self.files[file].append(test)
                    for line in lines:
                        self.lines[file][line].append(test)

    def tests(self, file: str, line: int) -> list[Test]:
        """Those that reach a line, or what it is a part of; of a line that runs at import all that use the file."""
        for begin, end in _around(file)[line]:
            if found := {test.name: test for at in range(begin, end) for test in self.lines[file].get(at, ())}:
                return in_order(file, found.values())
        return [] if _around(file)[line] else in_order(file, self.files[file] or self.all)


def in_order(file: str, tests: Iterable[Test]) -> list[Test]:
    """First those that are about the file; then one of each function before any second, quick ones first."""
    functions: Mapping[str, list[Test]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: test.seconds):
        functions[test.name.partition("[")[0]].append(test)
    ordered = sorted(functions.values(), key=lambda tests: (not tests[0].about(file), tests[0].seconds))
    return [test for test in chain.from_iterable(zip_longest(*ordered)) if test is not None]


@cache
def _around(file: str) -> Mapping[int, list[tuple[int, int]]]:
    """Of each line, the lines of which it is a part, from within: itself, its statement, its function.

    None where the line runs at import.
    """
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def visit(node: ast.AST, within: bool) -> None:
        for child in ast.iter_child_nodes(node):
            visit(child, within or isinstance(node, ast.FunctionDef))
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            for line in range(first, node.body[0].lineno):  # what is said of it is used where it runs
                found[line].append((node.body[0].lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.stmt | ast.ExceptHandler) and within:
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or 0) + 1
            for line in range(node.lineno, end):
                found[line] += [(line, line + 1), (node.lineno, end)]

    visit(ast.parse((ROOT / file).read_text()), False)
    return found
