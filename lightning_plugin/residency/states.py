"""The states of whatever may live elsewhere than on the device, and the moves between them.

[Note: residency] A *resident* is a boundary, a cotangent, a streamed tensor, its gradient, or what an optimizer keeps
for it. Its *home* is memory of one tier. On the device there is a *part* of it at most: a tile of a map, the copy of a
streamed tensor. A map whose tier is the device itself is at home there, and its parts are views.

    resident                    UNMADE ──room is made──► HOME ──let go, cleared──► UNMADE
    its part, on the way up     HOME ──fetched──► COMING ──taken──► HERE ──the last reference dies──► HOME
    its part, on the way down   HERE ──written, added──► GOING ──settled──► HOME

    who                         is made by                  goes back to UNMADE when
    boundary                    the segment that stores it  dropped; brought back by `execute.again`
    cotangent                   the first gradient          the segment that made its map has pulled back
    streamed tensor             `Homes.settle`              never: what lives below once stays there
    gradient, optimizer state   backward; a step            their owner lets them go

All transfers are a `Courier`'s, of tiles and of copies alike, and the memory that tiles need on the way is a `Pool`'s.
A copy has memory of its own, since it outlives the use of a pool: autograd may hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class State(Enum):
    """Where the values of a resident, or of a part of it, are."""

    UNMADE = "not made"
    HOME = "at home"
    COMING = "on its way to the device"
    HERE = "on the device"
    GOING = "on its way home"


#: The legal moves.
MOVES: Mapping[State, frozenset[State]] = {
    State.UNMADE: frozenset({State.HOME}),
    State.HOME: frozenset({State.UNMADE, State.COMING}),
    State.COMING: frozenset({State.HERE}),
    State.HERE: frozenset({State.GOING, State.HOME}),
    State.GOING: frozenset({State.HOME}),
}


class Life(Generic[T]):
    """The state of a resident, or of a part of it, and what holds its values in that state."""

    __slots__ = ("holder", "state")

    def __init__(self, state: State = State.UNMADE, holder: T | None = None) -> None:
        self.state = state
        self.holder = holder

    def to(self, state: State, holder: T | None = None) -> None:
        """Move on."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"what is {self.state.value} cannot be {state.value} next")
        self.state, self.holder = state, holder
