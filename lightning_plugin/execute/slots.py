"""What is stored of what goes from one link of a chain to the next."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_plugin.execute.again import Inputs


@dataclass(eq=False)
class Slots:
    """The entries that are stored, by the number of the link that reads them. Those of the first always are; beside
    them there is room for so many."""

    room: int
    stored: dict[int, Inputs] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.room - len(self.places) + (0 in self.stored)

    def put(self, k: int, entries: Sequence[Tensor]) -> None:
        if k not in self.stored:
            insort(self.places, k)
        self.stored[k] = Inputs.of([t.detach() for t in entries], None)

    def nearest(self, k: int) -> int:
        """The last link, no later than this one, whose entries are stored."""
        if not self.places:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what a chain of links has stored went with the "
                "first. Pull back with retain_graph=True before."
            )
        return self.places[bisect_right(self.places, k) - 1]

    def get(self, k: int) -> list[Tensor]:
        return self.stored[k].tensors()

    def drop(self, k: int) -> None:
        if self.stored.pop(k, None) is not None:
            self.places.remove(k)

    def clear(self) -> None:
        self.stored.clear()
        self.places.clear()
