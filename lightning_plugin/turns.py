"""Whose turn it is in a rehearsal, and how much each turn holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Turn:
    """A segment's forward or backward: how much was live while it ran.

    ``peak`` is the most that was live, ``needs`` the most beyond what was live when it began, and ``retained`` the same
    if nothing of what the graph of autograd keeps had been let go on the way, as under ``retain_graph=True``.
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
    """The turns of a step, by the place of a segment and "forward" or "backward"; ``now`` is the one under way.

    ``began`` is what was live when the step began, ``held`` what is left of forward when backward begins.
    """

    began: int
    held: int = 0
    known: dict[Any, Turn] = field(default_factory=dict)
    now: Turn = field(default_factory=Turn)
    former: list[Turn] = field(default_factory=list)

    def enter(self, who: Any, live: int, goes_on: bool = False) -> None:
        """From now on it is ``who``'s turn: a new one, or, where it ``goes_on``, the one that began before."""
        self.now = self.known.setdefault(who, Turn(live))
        if not goes_on:
            self.now.began, self.now.released = live, 0
        self.now.see(live)

    def within(self, who: Any, live: int) -> None:
        """It is ``who``'s turn until `back`."""
        self.former.append(self.now)
        self.enter(who, live)

    def back(self, live: int) -> None:
        self.now = self.former.pop()
        self.now.see(live)

    def leave(self) -> None:
        """From now on it is nobody's turn."""
        self.now = Turn()

    def graph(self, live: int) -> None:
        """Forward is over."""
        self.held = live - self.began
