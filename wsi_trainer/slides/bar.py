"""The progress bar of a run over slides: how many are done, how many bytes, and how long it will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


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
