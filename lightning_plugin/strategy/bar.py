"""A progress bar of the tiles inside one step, beside the Trainer's own bar and in its style."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning_plugin.progress import Kind, Progress

#: Steps that are over sooner need no bar of their own.
PATIENCE = 2.0

#: How often a bar is drawn anew, in seconds.
EVERY = 0.1


class TileBar:
    """Counts tiles; shows them, and the time left, once a step has lasted a while."""

    def __init__(self, progress: Progress) -> None:
        self.listeners = progress.listeners
        self.total = self.done = 0
        self.began = self.drawn = 0.0
        self.host: Any = None
        self.shown: Rich | Tqdm | None = None

    def begin(self, host: Any) -> None:
        """A step begins; ``host`` is the Trainer's progress bar, or None where there is to be none."""
        self.end()
        self.host = host if host is not None and host.is_enabled else None
        self.total = self.done = 0
        self.began = time.monotonic()
        if self not in self.listeners and self.host is not None:
            self.listeners.append(self)

    def more(self, tiles: int) -> None:
        """So many tiles are to come."""
        self.total += tiles

    def tile(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self.host is None or now - self.began < PATIENCE or now - self.drawn < EVERY:
            return
        self.drawn = now
        if self.shown is None:
            self.shown = beside(self.host)
        self.shown.show(self.done, self.total)

    def alike(self, count: int) -> None:
        return

    def spent(self, kind: Kind, seconds: float) -> None:
        return

    def end(self) -> None:
        """The step is over."""
        if self.shown is not None:
            self.shown.hide()
        self.shown = None
        if self in self.listeners:
            self.listeners.remove(self)


class Rich:
    """One more line in the Trainer's rich display. Lightning finds its lines by number, so ours stays when hidden."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        found = [t.id for t in progress.tasks if t.description == "tiles"]
        self.line = found[0] if found else progress.add_task("tiles", total=1, visible=False)
        progress.reset(self.line)

    def show(self, done: int, total: int) -> None:
        self.progress.update(self.line, completed=done, total=max(done, total), visible=True)
        self.progress.refresh()

    def hide(self) -> None:
        self.progress.update(self.line, visible=False)


class Tqdm:
    """A line below the Trainer's tqdm bar."""

    def __init__(self, host: Any) -> None:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        position = 2 * getattr(host, "process_position", 0) + 2
        self.bar = tqdm(desc="tiles", total=1, position=position, leave=False, dynamic_ncols=True, file=sys.stdout)

    def show(self, done: int, total: int) -> None:
        self.bar.total = max(done, total)
        self.bar.n = done
        self.bar.refresh()

    def hide(self) -> None:
        self.bar.close()


def beside(host: Any) -> Rich | Tqdm:
    """A bar in the style of the Trainer's."""
    progress = getattr(host, "progress", None)
    return Tqdm(host) if progress is None else Rich(progress)
