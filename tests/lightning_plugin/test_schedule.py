"""The schedule of a chain is the best there is, as trying all of them shows; and log n slots do for any length."""

from __future__ import annotations

from functools import cache
from math import comb, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_plugin.chain import first_stored, forwards_after_run, min_forward_runs, stored_links, total_forwards


@cache
def least(length: int, free: int) -> int:
    """The fewest forward runs, from all places at which a first map may be stored."""
    if length == 1:
        return 0
    if free == 0:
        return length * (length - 1) // 2
    return min(m + least(length - m, free - 1) + least(m, free) for m in range(1, length))


def replayed(length: int, free: int, before: bool = False) -> tuple[int, int]:
    """Pull a chain back link by link, as it is done: all forward runs, and the most of one link. A run of the whole
    chain may have been ``before``."""
    held, total, ran = {0, *(stored_links(length, free) if before else ())}, 0, [0] * length
    for k in reversed(range(length)):
        at = max(place for place in held if place <= k)
        fill = {at + i for i in stored_links(k - at + 1, free - len(held) + 1)}
        for j in range(at, k):
            held |= {j} & fill
            ran[j] += 1
            total += 1
        held -= {k} - {0}
        assert len(held) <= free + 1
    return total, max(ran)


@pytest.mark.parametrize("free", range(7))
def test_no_schedule_runs_less_forward(free: int) -> None:
    for length in range(1, 60):
        assert total_forwards(length, free) == least(length, free) == replayed(length, free)[0]


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(1, 400), st.integers(0, 12))
def test_what_is_stored_has_room_and_no_link_runs_more_often_than_said(length: int, free: int) -> None:
    total, most = replayed(length, free)
    assert most <= min_forward_runs(length, free) and total == total_forwards(length, free)
    assert replayed(length, free, before=True)[0] == forwards_after_run(length, free)
    places = list(stored_links(length, free))
    assert len(places) <= free and places == sorted(set(places)) and all(0 < p < length for p in places)


def test_log_slots_do_for_any_length() -> None:
    for length in (152, 10_001, 250_001, 10**9):
        slots = 2 * int(log2(length))
        assert (
            min_forward_runs(length, slots) <= log2(length) / 2
            and comb(slots + 1 + min_forward_runs(length, slots), slots + 1) >= length
        )
        assert total_forwards(length, slots) <= length * log2(length) / 2


def test_no_room_or_no_links_is_said() -> None:
    with pytest.raises(ValueError, match="a chain of 1 with room for 3 maps stores none"):
        first_stored(1, 3)
    with pytest.raises(ValueError, match="2 links and 1 map or more"):
        first_stored(5, 0)
