"""Smaller tiles for a backward that finds less room: they lie in those that were planned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.execute.room import halve_tiles


@given(
    st.tuples(st.integers(5, 40), st.integers(5, 12)), st.integers(1, 5), st.integers(0, 1), st.integers(1, 4)
)  # fmt: skip
def test_half_tiles_of_given_sides_lie_in_whole_ones(
    extent: tuple[int, int], power: int, axis: int, times: int
) -> None:
    side = 1 << power
    grid = Grid(tuple(-(-size // side) for size in extent), (side, side))
    finer = grid
    for _ in range(times):
        finer = halve_tiles(finer, axis, extent[axis])
    whole = [box for (box,) in grid.partition([extent])]
    parts = [box for (box,) in finer.partition([extent])]
    assert sum(b.positions for b in parts) == Box.whole(extent).positions
    assert all(any(w.contains(p) for w in whole) for p in parts)
    assert max(p.extent[axis] for p in parts) == min(extent[axis], max(1, side >> times))
