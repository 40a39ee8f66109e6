"""What the ledger of a rehearsal notes, and how it notes a pass over tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from lightning_plugin.trace import Trace


class Note(NamedTuple):
    """Something that a rehearsal's ledger has noted: ``what``, how many bytes, and whose it is."""

    what: str
    size: int = 0
    who: Any = None


class Stretch:
    """A pass over tiles in a rehearsal: the most that was live beyond what was when it began.

    That is said in phases. One ends where room for a whole map is made: with that, the next begins. So what tiles need
    is known apart from the sizes of whole maps. ``born`` is what was made since and is still there, but for the rooms,
    by its number in the pass's trace; ``lost`` what was there before and has gone. ``known`` is what a pass like it has
    needed in an earlier step.
    """

    def __init__(self, live: int, known: Sequence[int] = ()) -> None:
        self.known = known
        self.began = live
        self.needs = [0]
        self.rooms: list[int] = []
        self.born: dict[int, int] = {}
        self.lost: list[Note] = []
        self.sizes: list[int] = []
        self.before: set[int] = set()
        self.phases: list[list[int]] = [[]]

    def made(self, key: int, size: int, live: int) -> None:
        """Something was made, and so much is live with it."""
        self.see(live)
        self.born[key] = len(self.sizes)
        self.phases[-1].append(len(self.sizes))
        self.sizes.append(size)

    def gone(self, key: int, note: Note) -> None:
        """Something has gone, as a note says."""
        number = self.born.pop(key, None)
        if number is None:
            number = len(self.sizes)
            self.before.add(number)
            self.sizes.append(note.size)
            self.lost.append(note)
        self.phases[-1].append(~number)

    def see(self, live: int) -> None:
        if live - self.began > self.needs[-1]:
            self.needs[-1] = live - self.began

    def next(self, room: int, live: int) -> None:
        """So much room was made."""
        self.began += room
        self.rooms.append(room)
        self.needs.append(max(0, live - self.began))
        self.phases.append([])

    @property
    def most(self) -> int:
        """The most that is known to be live in the phase under way."""
        phase = len(self.rooms)
        return self.began + self.known[phase] if phase < len(self.known) else 0

    @property
    def trace(self) -> Trace:
        return Trace(tuple(map(tuple, self.phases)), tuple(self.sizes), frozenset(self.before))

    def notes(self) -> Iterator[Note]:
        """What a ledger notes of it: the same of two passes, whether they were run or known."""
        for needs, room in zip_longest(self.needs, self.rooms):
            yield Note("passing", needs)
            if room is not None:
                yield Note("made", room)
        for size in sorted(self.sizes[number] for number in self.born.values()):
            yield Note("made", size)
        yield from self.lost
