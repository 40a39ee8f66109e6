"""Output of a run for people: progress bar, table and notes at its end, failures.csv, and the page of masks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from wsi_trainer.errors import UserError
from wsi_trainer.io.display import cell, say, template
from wsi_trainer.io.files import replace_file
from wsi_trainer.io.tables import escape_formula, table_bytes
from wsi_trainer.slide.rules import RULES
from wsi_trainer.store.convert import Converted

from .pool import Failure
from .stores import STORES, TEMPLATE, Listing, write_file

PAGE = "tissue.html"
_MOST_ROWS = 40
_MOST_NOTES = 5
_LEAST = 0.001
"""Share of tissue, or of background, below which a mask is doubtful."""


def make_folder(out: Path) -> None:
    """Makes the folder of results, or refuses one that cannot be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise UserError(f"{out} cannot be written to")


def write_failures(out: Path, failures: Sequence[Failure], shard: str | None) -> None:
    """Writes why slides of this run were not converted."""
    part = "" if shard is None else f"-{shard.replace('/', '-of-')}"
    path = out / f"failures{part}.csv"
    names = [field.name for field in fields(Failure)]
    rows = [{name: escape_formula(getattr(failure, name)) for name in names} for failure in failures]
    write_file(path, table_bytes(names, rows))


def show(console: Console, done: Sequence[Converted], failures: Sequence[Failure]) -> None:
    """The table of a run's stores, and what there is to say of its slides."""
    if done and len(done) <= _MOST_ROWS:
        table = Table("slide", "width × height", "µm/px", "levels", "tissue", "lost by the mask")
        for row in done:
            share = "" if row.tissue is None else f"{row.tissue:.1%}"
            lost = "" if row.lost is None else f"{row.lost:.2%}"
            size = f"{row.width} × {row.height}"
            table.add_row(cell(row.name), size, "" if row.mpp is None else f"{row.mpp:g}", str(row.levels), share, lost)
        console.print(table)
    notes = [(row.name, note) for row in done for note in (row.note, _doubt(row)) if note]
    for name, note in notes[:_MOST_ROWS]:
        say(console, f"{name}: {note}", lead="note")
    for failure in failures[:_MOST_ROWS]:
        say(console, f"{failure.slide}: {failure.reason} ({failure.kind})", lead="failed", lead_style="red")
    if len(failures) > _MOST_ROWS:
        say(console, f"and {len(failures) - _MOST_ROWS} more")


def _doubt(row: Converted) -> str:
    """A mask that is hardly right."""
    if row.tissue is None or _LEAST < row.tissue < 1 - _LEAST:
        return ""
    return f"{row.tissue:.1%} of the slide is tissue; look at tissue.html"


def show_notes(console: Console, out: Path, listing: Listing, missing: Sequence[str]) -> None:
    """Notes on the folder: slides that are in it twice, are gone, or are not in its manifest."""
    notes = [
        f"{', '.join(names)} were made from the same file; list one of them in your manifest, and remove the others"
        for names in listing.twins
    ]
    if listing.gone:
        notes.append(f"{out / STORES} listed {len(listing.gone)} stores that are gone, such as {listing.gone[0]}.zarr")
    if missing:
        names = ", ".join([*missing[:_MOST_NOTES], *(["..."] if len(missing) > _MOST_NOTES else [])])
        notes.append(
            f"{out / TEMPLATE} is yours, and lacks lines for {len(missing)} of the slides: {names}; add those that you "
            "train with"
        )
    for note in notes[:_MOST_NOTES]:
        say(console, note, lead="note", lead_style="yellow")
    if len(notes) > _MOST_NOTES:
        say(console, f"and {len(notes) - _MOST_NOTES} more", lead="note", lead_style="yellow")


@dataclass(frozen=True)
class Entry:
    """A slide on the page."""

    name: str
    thumbnail: str
    """Relative to the page, like the overlay."""
    overlay: str | None
    tissue: float
    """Fraction of the slide that is tissue after all rules."""
    rules: Mapping[str, float] = field(default_factory=dict)
    """Fraction that each rule removed or added, of the mask before it."""
    note: str = ""

    @property
    def removed(self) -> float:
        """Fraction of the mask that all rules together removed."""
        left = 1.0
        for rule in RULES:
            if not rule.adds:
                left *= 1 - self.rules.get(rule.name, 0.0)
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
    used = [rule for rule in RULES if any(rule.name in entry.rules for entry in entries)]
    ordered = sorted(entries, key=lambda entry: (-entry.removed, entry.name))
    page = template("wsi_trainer.preprocess", "tissue.html.j2").render(
        title=title, entries=ordered, rules=used, failed=failed
    )
    replace_file(path, page.encode())


class SlideBar:
    """Counts finished slides, and bytes of slides by the share of each that is done."""

    def __init__(self, bar: Progress, title: str, sizes: Sequence[int]) -> None:
        self._bar, self._title, self._sizes = bar, title, sizes
        self._parts = [0.0] * len(sizes)
        self._done = 0.0
        self._finished = 0
        self._task = bar.add_task(self._text(), total=max(1, sum(sizes)))

    def _text(self) -> str:
        return f"{self._title} {self._finished}/{len(self._sizes)} slides"

    def part(self, number: int, share: float) -> None:
        """Notes how much of a slide is done, from 0 to 1."""
        self._done += (share - self._parts[number]) * self._sizes[number]
        self._parts[number] = share
        self._bar.update(self._task, completed=self._done)

    def finished(self, number: int) -> None:
        """Notes that nothing is left to do for a slide."""
        self._finished += 1
        self._bar.update(self._task, description=self._text())
        self.part(number, 1.0)


@contextmanager
def slide_bar(console: Console, title: str, sizes: Sequence[int]) -> Iterator[SlideBar]:
    """A bar on the console for slides of these sizes in bytes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield SlideBar(bar, title, sizes)
