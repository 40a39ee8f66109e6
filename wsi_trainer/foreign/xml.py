"""XML of others, as a stream of elements: nothing outside of the text is opened, and entities are refused.

A document with entities of its own could grow without bound, and one that names a file could have it read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.parsers import expat

from .files import Unreadable, read_bytes

Start = Callable[[str, dict[str, str]], None]
End = Callable[[str], None]
MOST_NESTED = 1000


def read_xml(path: Path, start: Start, end: End) -> None:
    """Call back for each element of a file, where it begins (with its attributes) and where it ends."""
    parse_xml(read_bytes(path), path, start, end)


def parse_xml(data: bytes | str, where: Path | str, start: Start, end: End, namespaces: bool = False) -> None:
    """Call back for each element of a text; with namespaces, a name is `NAMESPACE}NAME` where it is in one.

    Raises:
        Unreadable: It is no XML, declares entities, or is nested too deep.
    """
    parser, depth = expat.ParserCreate(namespace_separator="}" if namespaces else None), 0

    def refuse(*_: object) -> None:
        raise Unreadable(where, "declares entities, which nobody needs here; export it again")

    def begin(tag: str, its: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MOST_NESTED:
            raise Unreadable(where, f"has elements nested more than {MOST_NESTED} deep")
        start(tag, its)

    def close(tag: str) -> None:
        nonlocal depth
        depth -= 1
        end(tag)

    parser.StartElementHandler, parser.EndElementHandler, parser.EntityDeclHandler = begin, close, refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise Unreadable(where, f"is no whole XML file: {error}") from error
