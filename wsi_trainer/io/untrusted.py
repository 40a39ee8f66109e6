"""Untrusted files: regular ones only, sizes checked before memory is asked for, and nothing in them is executed.

YAML: a few lines may stand for billions of values, and a key that is there twice silently has its last value. Both are
refused before the parser makes anything of the text. XML: a stream of elements. Documents with entities, which may grow
without bound or name other files, are refused.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from xml.parsers import expat

import yaml

if TYPE_CHECKING:
    from PIL import Image

from wsi_trainer.errors import UserError

_KINDS = {stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
_MIB = 1 << 20


class Unreadable(UserError, ValueError):
    """A file that cannot be read, for the reason given.

    It is a `ValueError` too, so that code which reads a part of something larger can say what is damaged.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.path, self.reason)


@dataclass(frozen=True)
class Limit:
    """A number that the user can raise with an environment variable, read each time: it holds in workers too."""

    variable: str
    default: float

    @property
    def value(self) -> float:
        text = os.environ.get(self.variable, "")
        try:
            value = float(text) if text else self.default
        except ValueError:
            value = math.nan
        if not value > 0:
            raise UserError(f"{self.variable}={text}: expected a number above 0")
        return value

    def refusal(self, found: float, what: str, unit: str = "") -> str | None:
        """The reason to refuse `what`, which needs so much; None within the limit."""
        if found <= self.value:
            return None
        return (
            f"{what}, more than the limit of {self.value:g}{unit}; if that is right, set "
            f"{self.variable}={math.ceil(found)} in the environment"
        )


TEXT = Limit("WSI_TRAIN_MAX_TEXT_MIB", 512)
"""A file that is read whole: JSON, YAML, XML, a table. Outlines of a million cells have about 300 MiB."""


def what_is(path: Path) -> str | None:
    """The name of a pipe, socket or device at a path; None for a file, a folder and nothing."""
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG
    return next((name for test, name in _KINDS.items() if test(mode)), None)


def open_file(path: Path) -> BinaryIO:
    """Open a file to read bytes of it: a pipe would never end, and a device may do anything.

    Raises:
        Unreadable: It is no file.
        OSError: The system refuses.
    """
    if kind := what_is(path):
        raise Unreadable(path, f"is {kind} and not a file")
    return path.open("rb")


def read_bytes(path: Path, most: Limit = TEXT) -> bytes:
    """The content of a file, no more than the limit.

    Raises:
        Unreadable: It is no file, or too large.
        OSError: The system refuses.
    """
    with open_file(path) as file:
        length = os.fstat(file.fileno()).st_size
        check_length(path, length, most)
        data = file.read(length + 1)  # as much memory is asked for
        while more := file.read(len(data)) if len(data) > length else b"":  # it grows while it is read
            data += more
            check_length(path, len(data), most)
    return data


def check_length(path: Path, length: int, most: Limit) -> None:
    """Refuse a file of too many bytes."""
    found = length / _MIB
    if reason := most.refusal(found, f"has {math.ceil(found)} MiB", " for a file that is read whole"):
        raise Unreadable(path, reason)


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
    """The number of values that a node stands for."""
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


Start = Callable[[str, dict[str, str]], None]
End = Callable[[str], None]
MOST_ELEMENTS = 1000


def read_xml(path: Path, start: Start, end: End) -> None:
    """Call back for each element of a file, where it begins (with its attributes) and where it ends."""
    parse_xml(read_bytes(path), path, start, end)


class BrokenXml(Unreadable):
    """A text that is no XML, or not all of one."""


def parse_xml(
    data: bytes | str, where: Path | str, start: Start, end: End, namespaces: bool = False, text: End | None = None
) -> None:
    """Call back for each element of a text; with namespaces, a name is `NAMESPACE}NAME` where it is in one.

    Args:
        data: The XML.
        where: What errors name.
        start: Told of the beginning of an element.
        end: Told of its end.
        namespaces: Whether names have their namespace.
        text: Told of what stands between the elements, in pieces.

    Raises:
        BrokenXml: It is no XML.
        Unreadable: It declares entities, or is nested too deep.
    """
    parser, depth = expat.ParserCreate(namespace_separator="}" if namespaces else None), 0

    def refuse(*_: object) -> None:
        raise Unreadable(where, "declares entities, which nobody needs here; export it again")

    def begin(tag: str, its: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MOST_ELEMENTS:
            raise Unreadable(where, f"has elements nested more than {MOST_ELEMENTS} deep")
        start(tag, its)

    def close(tag: str) -> None:
        nonlocal depth
        depth -= 1
        end(tag)

    parser.StartElementHandler, parser.EndElementHandler, parser.EntityDeclHandler = begin, close, refuse
    if text is not None:
        parser.CharacterDataHandler = text
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise BrokenXml(where, f"is no whole XML file: {error}") from error


DECODED = Limit("WSI_TRAIN_MAX_DECODED_MIB", 512)
"""Memory of what has to be decoded at once: a tile or a strip of a slide, a chunk of a store, a PNG, an overview."""
FORMATS = ("PNG", "JPEG")


def read_picture(path: Path, mode: str | None = None) -> Image.Image:
    """A picture, decoded; converted where a mode is asked for.

    Raises:
        Unreadable: It is none, or too large.
        OSError: The system refuses.
    """
    from PIL import Image

    data = read_bytes(path)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            if reason := too_much(f"a picture of {picture.width} x {picture.height} px", 4 * math.prod(picture.size)):
                raise Unreadable(path, reason)
            picture.load()
            return picture.convert(mode) if mode else picture.copy()
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(path, f"is no picture, or a damaged one ({type(error).__name__}: {error})") from error


def too_much(what: str, size: int) -> str | None:
    """The reason to refuse what takes so many bytes of memory at once; None within the limit."""
    return DECODED.refusal(size / _MIB, f"{what} would take {math.ceil(size / _MIB)} MiB of memory at once")
