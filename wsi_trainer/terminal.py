"""The one door to the terminal for texts that hold names, labels and reasons: none is markup or a control code there.

A file may be called `[red]`, `:x:` or hold an escape code. rich would take the first two for its own markup, and a
terminal would obey the third.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from rich.console import Console
from rich.text import Text

#: Control characters, what turns the direction of text, and halves of characters, which stand for bytes of a name that
#: are not UTF-8.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)


def clean(text: object) -> str:
    """The text with everything that a terminal would obey, or could not show, written as an escape sequence."""
    return _UNSAFE.sub(_escaped, str(text))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code in _BYTES:
        return f"\\x{code - 0xDC00:02x}"
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(found[0])
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def cell(text: object) -> Text:
    """The text for a cell of a table."""
    return Text(clean(text))


def say(console: Console, text: object, style: str = "", lead: str = "", lead_style: str = "") -> None:
    """Print one line as it is, perhaps after a short word in a style of its own.

    Args:
        console: Where to.
        text: What, from anywhere.
        style: rich's name of how it looks.
        lead: A word of the program before it.
        lead_style: How that looks.
    """
    line = Text(f"{lead} " if lead else "", style=lead_style)
    line.append(clean(text), style=style or None)
    console.print(line, soft_wrap=True, highlight=False)


def is_text(name: str) -> bool:
    """Whether a file's name is text, which can be written to a table and read again."""
    return not any(unicodedata.category(character) == "Cs" for character in name)


def speakable(stream: Any) -> None:
    """Let a stream escape what its encoding lacks instead of raising an error."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
