"""The page of all thumbnails with their masks, those first from which most was taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from wsi_trainer.pages import template
from wsi_trainer.slides.rules.table import ROWS
from wsi_trainer.slides.store.files import replace_file

PAGE = "tissue.html"


@dataclass(frozen=True)
class Entry:
    """A slide on the page."""

    name: str
    thumbnail: str
    """Relative to the page, like the overlay."""
    overlay: str | None
    tissue: float
    """How much of the slide is tissue after all rules."""
    rules: Mapping[str, float] = field(default_factory=dict)
    """Of each rule that looked at the slide: what it took or put in, as a share of what it was shown."""
    note: str = ""

    @property
    def removed(self) -> float:
        """What all rules together took away."""
        left = 1.0
        for row in ROWS:
            if not row.adds:
                left *= 1 - self.rules.get(row.name, 0.0)
        return 1 - left

    @property
    def links(self) -> tuple[str, str | None]:
        """Thumbnail and overlay as addresses: names of slides may hold any character."""
        return quote(self.thumbnail), None if self.overlay is None else quote(self.overlay)


def write_page(path: Path, title: str, entries: Sequence[Entry], failed: Sequence[tuple[str, str]] = ()) -> None:
    """Writes the page; pictures stay files of their own, and are loaded as they are scrolled to.

    Args:
        path: The page.
        title: Its title.
        entries: The slides with a mask.
        failed: Slides without one, and why.
    """
    used = [row for row in ROWS if any(row.name in entry.rules for entry in entries)]
    ordered = sorted(entries, key=lambda entry: (-entry.removed, entry.name))
    page = template("wsi_trainer.slides.review", "page.html.j2").render(
        title=title, entries=ordered, rows=used, failed=failed
    )
    replace_file(path, page.encode())
