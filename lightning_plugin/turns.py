"""Turns: the memory of each segment's forward and backward in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Turn:
    """The memory of a segment's forward or backward while it ran.

    Attributes:
        began: Bytes that were live when it began.
        released: Bytes of autograd's graph that were freed since.
        peak: The most bytes that were live.
        needs: The most bytes beyond those that were live when it began.
        retained: The same if nothing of autograd's graph had been freed, as under ``retain_graph=True``.
    """

    began: int = 0
    released: int = 0
    peak: int = 0
    needs: int = 0
    retained: int = 0

    def see(self, live: int) -> None:
        self.peak = max(self.peak, live)
        self.needs = max(self.needs, live - self.began)
        self.retained = max(self.retained, live - self.began + self.released)


@dataclass(eq=False)
class Turns:
    """The turns of a step.

    Attributes:
        began: Bytes that were live when the step began.
        held: Bytes that forward leaves when backward begins.
        known: The turns, by the place of a segment and "forward" or "backward".
        now: The turn under way.
        former: Turns that are interrupted by it.
    """

    began: int
    held: int = 0
    known: dict[Any, Turn] = field(default_factory=dict)
    now: Turn = field(default_factory=Turn)
    former: list[Turn] = field(default_factory=list)

    def enter(self, who: Any, live: int, goes_on: bool = False) -> None:
        """Begin a turn or, if it ``goes_on``, continue it."""
        self.now = self.known.setdefault(who, Turn(live))
        if not goes_on:
            self.now.began, self.now.released = live, 0
        self.now.see(live)

    def within(self, who: Any, live: int) -> None:
        """Interrupt the turn under way by another, until `back`."""
        self.former.append(self.now)
        self.enter(who, live)

    def back(self, live: int) -> None:
        """Continue the turn that was interrupted."""
        self.now = self.former.pop()
        self.now.see(live)

    def leave(self) -> None:
        """End the turn under way."""
        self.now = Turn()

    def graph(self, live: int) -> None:
        """Note the end of forward."""
        self.held = live - self.began
