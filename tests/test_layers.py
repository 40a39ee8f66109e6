"""One way down: a file imports only from layers below its own, and no two files need each other.

Imports within functions count like all others; those for type checkers do not run, and do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lightning_plugin", "wsi_trainer")

#: The layers of the engine, from the top: files, and folders as a whole.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__",),  # the names that users import
    ("check", "infer"),
    ("module", "strategy"),  # the two ways in
    ("kept_calls", "registration"),  # calls that need no tiles; names for Trainers
    ("engine",),  # has recordings run, and owns what outlives a step
    ("plans",),  # plans that are made, remembered and saved
    ("planner",),  # decides
    ("capture",),  # records what a user's code does
    ("execute",),  # runs a plan
    ("residency",),  # where values live, and how they get there
    ("program",),  # a segment, made ready to be run or planned
    ("options",),  # what a user may say
    ("split",),  # an approximation that a user may ask for
    ("plan", "rules", "chain"),  # decisions; operators; links
    ("sink",),  # what takes a result box by box
    ("graph",),  # what is to be run
    ("ops", "plan_views"),
    ("constants",),  # contents of maps, as far as they are known
    ("layout", "source", "team"),
    ("ledger",),
    (
        "boxes",
        "fakes",
        "memory",
        "progress",
        "units",
    ),
    ("private",),  # what is private of PyTorch
    ("errors",),  # what is refused
)


#: The layers within the planner, from the top.
PLANNER: tuple[tuple[str, ...], ...] = (
    ("__init__",),
    ("make",),  # plans of a module, for one budget or for many
    ("choose",),  # asks until a plan that was rehearsed keeps the budget
    ("calibrate",),
    ("cache",),  # the user's folder: rates and recipes
    ("chains", "recipe"),
    ("search", "rehearsal"),
    ("costs",),
    ("analysis",),
    ("overhead",),  # answers that are kept, and Python's collector
)


def files(package: str) -> dict[str, Path]:
    found = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    unrun = {
        id(inner)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in unrun:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def edges(package: str) -> dict[str, set[str]]:
    known = files(package)
    return {name: {i for i in imports(path, known) if i in known and i != name} for name, path in known.items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_files_need_each_other(package: str) -> None:
    try:
        TopologicalSorter(edges(package)).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize(("root", "layers"), [("lightning_plugin", LAYERS), ("lightning_plugin.planner", PLANNER)])
def test_the_engine_has_one_way_down(root: str, layers: tuple[tuple[str, ...], ...]) -> None:
    level = {name: i for i, names in enumerate(layers) for name in names}

    def part(module: str) -> str:
        """The file or folder below the root that a module is, or is in."""
        return module.removeprefix(root).split(".")[1] if module != root else "__init__"

    def inside(module: str) -> bool:
        return module == root or module.startswith(f"{root}.")

    upward = [
        f"{name} -> {other}"
        for name, others in edges("lightning_plugin").items()
        for other in filter(inside, others if inside(name) else ())
        if part(name) != part(other) and part(other) != "__init__" and level[part(name)] >= level[part(other)]
    ]
    assert not upward
    assert {part(name) for name in filter(inside, files(root.split(".")[0]))} == set(level), "the table has all"


def test_the_engine_does_not_know_the_application() -> None:
    assert not [name for name, path in files("lightning_plugin").items() if "wsi_trainer" in path.read_text()]
