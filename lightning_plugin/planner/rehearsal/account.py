"""What a step holds, turn by turn, read off what the ledger of its rehearsal has noted.

An account can be made without the rehearsal, too: of the notes and of what each of their sizes would be for an image of
another size (`recipe`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_plugin.stretch import Note


@dataclass(frozen=True)
class Account:
    """What a rehearsal found: the peak of the step, of each segment's forward and backward, and what each backward
    needs beyond what is held when it begins, also if the graph is retained; ``held`` is what is left of forward when
    backward begins."""

    peak: int
    held: int
    forward: dict[int, int]
    backward: dict[int, int]
    needs: dict[int, int]
    retained: dict[int, int]


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


class Reading:
    """Notes, read in order."""

    def __init__(self) -> None:
        self.live = self.peak = self.began = self.held = 0
        self.turns: dict[Any, Turn] = {}
        self.now = Turn()
        self.former: list[Turn] = []

    def read(self, notes: Iterable[Note], sizes: Iterable[int]) -> Account:
        for note, size in zip(notes, sizes, strict=True):
            READ[note.what](self, size, note.who)
        forward = {who[0]: m for who, m in self.turns.items() if who[1] == "forward"}
        pulled = {who[0]: m for who, m in self.turns.items() if who[1] == "backward"}
        return Account(
            self.peak,
            self.held,
            {place: m.peak for place, m in forward.items()},
            {place: m.peak for place, m in pulled.items()},
            {place: m.needs for place, m in pulled.items()},
            {place: m.retained for place, m in pulled.items()},
        )

    def begin(self, size: int, who: Any) -> None:
        self.live = self.peak = self.began = size

    def made(self, size: int, who: Any) -> None:
        self.live += size
        self.passing(0, who)

    def passing(self, size: int, who: Any) -> None:
        self.peak = max(self.peak, self.live + size)
        self.now.see(self.live + size)

    def gone(self, size: int, of_graph: bool) -> None:
        self.live -= size
        if of_graph:
            self.now.released += size

    def enter(self, size: int, who: Any) -> None:
        self.now = self.turns.setdefault(who, Turn(self.live))
        self.now.began, self.now.released = self.live, 0
        self.now.see(self.live)

    def goes_on(self, size: int, who: Any) -> None:
        self.now = self.turns.setdefault(who, Turn(self.live))
        self.now.see(self.live)

    def within(self, size: int, who: Any) -> None:
        self.former.append(self.now)
        self.enter(size, who)

    def back(self, size: int, who: Any) -> None:
        self.now = self.former.pop()
        self.now.see(self.live)

    def leave(self, size: int, who: Any) -> None:
        self.now = Turn()

    def graph(self, size: int, who: Any) -> None:
        self.held = self.live - self.began


#: How each kind of note is read.
READ = {
    "begin": Reading.begin,
    "made": Reading.made,
    "passing": Reading.passing,
    "gone": Reading.gone,
    "enter": Reading.enter,
    "goes on": Reading.goes_on,
    "within": Reading.within,
    "back": Reading.back,
    "leave": Reading.leave,
    "graph": Reading.graph,
}


def account(notes: Sequence[Note]) -> Account:
    """The account of a rehearsal."""
    return Reading().read(notes, (note.size for note in notes))
