"""Text, JSON and YAML of others.

A few lines of YAML may stand for billions of values, and a key that is there twice silently has its last value. Both
are refused before the parser makes anything of the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from .files import TEXT, Limit, Unreadable, read_bytes

MOST_VALUES = 100_000
"""Values of one text of YAML, those that are repeated by reference counted each time."""
MOST_NESTED = 100
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path, most: Limit = TEXT) -> str:
    """A file as UTF-8, with or without a mark at its beginning."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(path, f"is no text in UTF-8 (byte {error.start}); save it as UTF-8") from error


def read_json(path: Path, most: Limit = TEXT) -> Any:
    """The value that a file of JSON holds, of whatever type."""
    return json_of(read_bytes(path, most), path)


def json_of(data: bytes | str, where: Path | str) -> Any:
    """The value of a text of JSON; errors name `where` it is from."""
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise Unreadable(where, f"is no JSON: it is not UTF-8 (byte {error.start})") from error
    except ValueError as error:  # a number of too many digits is one, too
        raise Unreadable(where, f"is no JSON: {error}") from error
    except RecursionError as error:
        raise Unreadable(where, "is no JSON that can be read: its values are nested too deep") from error


def read_yaml(path: Path, most: Limit = TEXT) -> Any:
    """The value that a file of YAML holds: plain values, nothing else."""
    return yaml_of(read_text(path, most), path)


def yaml_of(text: str, where: Path | str) -> Any:
    """The value of a text of YAML; errors name `where` it is from."""
    try:
        check_text(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # derives from SafeLoader, with limits
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2020-99-99 is a ValueError
        raise Unreadable(where, f"is no YAML: {' '.join(str(error).split())}") from error


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
