"""Reading YAML from anybody: within limits, and without two values for one key.

A few lines of YAML may stand for billions of values, and a key that is there twice silently has its last value. Both
are refused before the parser makes anything of the text.
"""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

MOST_VALUES = 100_000
"""Values of one text, those that are repeated by reference counted each time."""
MOST_NESTED = 100
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_text(text: str) -> None:
    """Refuse a YAML text that stands for too much, or gives a key twice.

    Raises:
        yaml.YAMLError: Says what is wrong and where.
    """
    if len(text) < MOST_NESTED and not any(sign in text for sign in ("\n", "{", "[", "&", "*")):
        return  # one plain value
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):  # what reads nodes would end the process in a deep one
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise yaml.YAMLError(f"values are nested more than {MOST_NESTED} deep{_place(event)}")
    node = yaml.compose(text, Loader=_Loader)
    if node is not None and _count(node, {}, ()) > MOST_VALUES:
        raise yaml.YAMLError(f"it stands for more than {MOST_VALUES} values, by references to references")


def _count(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """How many values a node stands for."""
    if id(node) in above:
        raise yaml.YAMLError(f"a value is a part of itself{_place(node)}")
    if id(node) not in known:
        above = (*above, id(node))
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(node)
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = list(node.value)
        known[id(node)] = 1 + sum(_count(part, known, above) for part in inner)
    return known[id(node)]


def _refuse_twice(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
            raise yaml.YAMLError(f"the key {key.value!r} is there twice{_place(key)}")
        seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")


def _place(part: yaml.Node | yaml.Event) -> str:
    return f", in line {part.start_mark.line + 1}" if part.start_mark is not None else ""


def read_texts_safely() -> None:
    """Have every parser check texts before it reads them."""
    read = get_loader("yaml")
    if getattr(read, "checks", False):
        return

    def checked(text: str) -> Any:
        check_text(text)
        return read(text)

    checked.checks = True  # type: ignore[attr-defined]
    set_loader("yaml", checked, exceptions=(yaml.YAMLError,))
