"""Mutants: small changes of a file, made by Cosmic Ray's operators."""

from __future__ import annotations

import ast
import hashlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from tests.mutation.places import ROOT


@dataclass(frozen=True)
class Mutant:
    """A file in which one operator of Cosmic Ray's was applied at its n-th occurrence; what the line was and became."""

    file: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return name_of(self.file, self.operator, self.occurrence)


def name_of(file: str, operator: str, occurrence: int) -> str:
    return f"{file} {digest(file)} {operator} {occurrence}"


@cache
def digest(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:12]


def sampled(files: list[str], seed: int, wanted: Callable[[str], bool]) -> Iterator[Mutant]:
    """Mutants whose names are wanted: evenly over files, and within a file over places before any place comes again."""
    waiting = deque(_of_file(name, random.Random(f"{seed} {name}"), wanted) for name in files)
    while waiting:
        try:
            mutant = next(waiting[0])
        except StopIteration:
            waiting.popleft()
            continue
        waiting.rotate(-1)
        if mutant is not None:
            yield mutant


def _of_file(name: str, draw: random.Random, wanted: Callable[[str], bool]) -> Iterator[Mutant | None]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    source = (ROOT / name).read_text()
    operators = OperatorProvider()
    meaning = _meaning(source)
    turns: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for choices in _places(source).values():
        draw.shuffle(choices)
        for turn, choice in enumerate(choices):
            turns[turn].append(choice)
    for turn in sorted(turns):
        draw.shuffle(turns[turn])
        for operator, occurrence in turns[turn]:
            if not wanted(name_of(name, operator, occurrence)):
                yield None  # its place in the order stays
                continue
            changed = mutate_code(source, operators[operator](), occurrence)
            if changed is not None and _meaning(changed) not in (meaning, None):
                yield Mutant(name, operator, occurrence, *_difference(source, changed), changed)


def _places(source: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """What can be changed: at each place, operators with the number of the occurrence there."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    nodes = list(ast_nodes(get_ast(source)))
    providers = OperatorProvider()
    places: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name in providers:
        if name in ("VariableReplacer", "VariableInserter"):  # they have to be told which variables
            continue
        operator, occurrence = providers[name](), 0
        for node in nodes:
            for begin, _ in operator.mutation_positions(node):
                places[begin].append((name, occurrence))
                occurrence += 1
    return places


def _meaning(source: str) -> str | None:
    """What of a module is run: annotations are text (`from __future__ import annotations`), and are left out."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def _difference(before: str, after: str) -> tuple[int, str, str]:
    """The first line that differs, and what it was and has become; empty lines are none."""
    one, other = before.splitlines(), after.splitlines()
    for what, begin, end, start, stop in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if what != "equal":
            line = next((at for at in range(begin, end) if one[at].strip()), begin)
            texts = (
                " ".join(text.strip() for text in part if text.strip()) for part in (one[begin:end], other[start:stop])
            )
            was, has_become = texts
            return line + 1, was, has_become or "(removed)"
    raise ValueError("nothing differs")
