"""The one door to the terminal for texts that hold names, labels and reasons: none is markup or a control code there.

A file may be called `[red]`, `:x:` or hold an escape code. rich would take the first two for its own markup, and a
terminal would obey the third.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from wsi_trainer.words import clean


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
    line = Text()
    if lead:
        line.append(f"{lead} ", style=lead_style or None)
    line.append(clean(text), style=style or None)
    console.print(line, soft_wrap=True)
