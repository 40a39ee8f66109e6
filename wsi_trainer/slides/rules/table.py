"""The table of rules, in the order in which they are applied."""

from __future__ import annotations

from dataclasses import dataclass

from wsi_trainer.slides.rules.blur import Blur
from wsi_trainer.slides.rules.edge import Edge
from wsi_trainer.slides.rules.fold import Fold
from wsi_trainer.slides.rules.look import Rule
from wsi_trainer.slides.rules.pale import Pale
from wsi_trainer.slides.rules.pen import Pen


@dataclass(frozen=True)
class Row:
    """A rule and what is said of it."""

    kind: type[Rule]
    looks_for: str
    colour: tuple[int, int, int]
    """In pictures and in QuPath."""
    usual: bool
    """Whether it is one of `--rules usual`."""
    adds: bool = False
    """Whether it puts into the mask what it finds, instead of taking it out."""
    on_dark: bool = False
    """Whether it also understands slides with a black ground (fluorescence)."""
    version: int = 1
    """Counts up when the same parameters give another mask: stores remember it."""

    @property
    def name(self) -> str:
        """As it is called in options, tables and pictures."""
        return self.kind.name


ROWS: tuple[Row, ...] = (
    Row(Pale, "pale tissue that the threshold left out: it is put in", (0, 150, 220), usual=False, adds=True),
    Row(Pen, "pen marks: black, blue, green, red", (220, 30, 200), usual=True),
    Row(Edge, "edges of cover glass and rims of bubbles", (110, 70, 20), usual=False),
    Row(Blur, "tissue out of focus", (250, 150, 0), usual=True, on_dark=True),
    Row(Fold, "folded tissue", (210, 20, 20), usual=False),
)
