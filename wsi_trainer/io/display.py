"""Text for terminals, logs and HTML: names of files, labels and reasons are never markup or control codes.

A file may be called `[red]`, `:x:` or hold an escape code. rich would take the first two for its own markup, and a
terminal would obey the third. Imports only the standard library before something is shown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Console
    from rich.text import Text

LOGGERS = ("pytorch_lightning", "lightning_fabric", "wsi_trainer", "lightning_plugin")
"""Names of the loggers whose messages are a run's."""


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    """In this context a handler gets what these loggers say.

    The console goes on showing warnings, as Python does by itself only where nobody listens.
    """
    loggers = [logging.getLogger(name) for name in LOGGERS]
    console = None if logging.root.handlers else logging.lastResort
    silent = [one for one in loggers if console is not None and one.propagate and console not in one.handlers]
    added = [(one, handler) for one in loggers] + [(one, console) for one in silent if console is not None]
    for logger, one in added:
        logger.addHandler(one)
    try:
        yield
    finally:
        for logger, one in added:
            logger.removeHandler(one)


#: Control characters, what turns the direction of text, and halves of characters, which stand for bytes of a name that
#: are not UTF-8.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_HALF = re.compile("[\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def clean(text: object) -> str:
    """The text with everything that a terminal would obey, or could not show, written as an escape sequence."""
    return _UNSAFE.sub(_escaped, str(text))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code in _BYTES:
        return f"\\x{code - 0xDC00:02x}"
    return _NAMED.get(found[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


class CleanFormatter(logging.Formatter):
    """Lines of a log: what is said in one is one, whatever names it holds; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return clean(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(clean, super().formatException(ei).split("\n")))


def is_text(name: str) -> bool:
    """True if a file's name is text, which can be written to a table and read again."""
    return _HALF.search(name) is None


def speakable(stream: Any) -> None:
    """Let a stream escape what its encoding lacks instead of raising an error."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def cell(text: object) -> Text:
    """The text for a cell of a table."""
    from rich.text import Text

    return Text(clean(text))


def say(console: Console, text: object, style: str = "", lead: str = "", lead_style: str = "") -> None:
    """Print one line as it is, perhaps after a short word in a style of its own.

    Args:
        console: The console.
        text: Text from anywhere.
        style: rich's name of how it looks.
        lead: A word of the program before it.
        lead_style: The style of that word.
    """
    from rich.text import Text

    line = Text()
    if lead:
        line.append(f"{lead} ", style=lead_style or None)
    line.append(clean(text), style=style or None)
    console.print(line, soft_wrap=True)


def template(package: str, name: str) -> Template:
    """A template that lies in a package; a name that it uses and is not given is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def format_bytes(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the loop ends at TiB")


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "a second"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# Cards in HTML, which a notebook shows.


def card(title: str, *parts: str) -> str:
    """A heading, and what it is about side by side."""
    inner = "".join(f"<div>{part}</div>" for part in parts if part)
    row = '<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start">'
    return f"<div><strong>{escape(title)}</strong>{row}{inner}</div></div>"


def rows(facts: Mapping[str, str]) -> str:
    """A table of names and values."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{cells}</table>"


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with a head; nothing where it has no lines."""
    if not lines:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{top}</tr>{body}</table>"
