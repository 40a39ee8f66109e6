"""Checkpoints of a long chain: the binomial schedule of divide and conquer.

A chain of equal links is pulled back from its end. What a link reads is made again by running forward from the nearest
map that is stored before it. With room for a few maps besides the first, the ones to store on the way are those that
make the links run as seldom as possible: with room for s maps, chains of up to C(s + r, r) links are pulled back while
no link runs forward more than r times for the sake of others (Griewank 1992; SCORCH calls it divide and conquer). So
log T maps are enough where each link may run log T times.

Nothing here holds anything for each link: a chain of any length is two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb


def runs(length: int, free: int) -> int:
    """The least number r such that a chain of so many links can be pulled back with room for ``free`` maps besides its
    first, and no link runs forward more than r times before it is pulled back."""
    if length <= 1:
        return 0
    if free == 0:
        return length - 1
    r = 0
    while comb(free + 1 + r, r) < length:
        r += 1
    return r


def forwards(length: int, free: int) -> int:
    """The number of times that links run forward, all together, before they are pulled back: each once for all that
    come after it in the worst case, with room for so many maps besides the first."""
    if length <= 1:
        return 0
    free = min(free, length - 1)
    r = runs(length, free)
    return r * length - comb(free + 1 + r, r - 1)


def again(length: int, free: int) -> int:
    """The same where a run of the whole chain has been before, and has stored what there was room for on its way."""
    return forwards(length, free) - max(stored(length, free), default=0)


def split(length: int, free: int) -> int:
    """The number of links to run before a map is stored, of so many that are to be pulled back."""
    if free < 1 or length < 2:
        raise ValueError(f"a chain of {length} with room for {free} maps stores none: give 2 links and 1 map or more")
    r = runs(length, free)
    most = comb(free + r, r - 1)  # what may lie before it, with as much room and one run less
    after = comb(free + r, r)  # what may lie behind it, with one map less
    return max(1, min(length - 1, most, max(length - after, comb(free + r - 1, max(0, r - 2)))))


def stored(length: int, free: int) -> Iterator[int]:
    """After how many links maps are stored, on the way to the last of so many that are to be pulled back."""
    at = 0
    while free > 0 and length - at > 1:
        at += split(length - at, free)
        free -= 1
        yield at
