"""The box algebra: partitions have one owner for every position, windows need what convolution reads."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin.boxes import (
    Box,
    Clip,
    Grid,
    Window,
    box_at,
    clip_interval,
    cuts,
    nonempty_pieces,
    reference_of,
    representative_indices,
    scaled_cuts,
)

sizes = st.integers(1, 60)
#: An interval, empty or not, in either order of its ends.
intervals = st.tuples(st.integers(-3, 6), st.integers(-3, 6))
some_boxes = st.lists(intervals, min_size=2, max_size=2).map(Box.of)


def positions(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(lo, hi) for lo, hi in box.intervals())))


@given(sizes, st.integers(1, 12))
def test_cuts_partition_and_interior_pieces_are_alike(size: int, pieces: int) -> None:
    ends = cuts(size, pieces)
    lengths = [b - a for a, b in pairwise(ends)]
    assert ends[0] == 0 and ends[-1] == size and len(lengths) == pieces
    full = [n for n in lengths if n == lengths[0]]
    assert all(0 <= n <= lengths[0] for n in lengths) and len(full) >= sum(n > 0 for n in lengths) - 1


@given(st.lists(st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 6))
def test_every_position_of_every_map_has_one_owner(extents: list[list[int]], rows: int, columns: int) -> None:
    """Maps with fewer and with more axes than the grid too."""
    extents = [tuple(e) for e in extents]
    owners = [torch.zeros(e, dtype=torch.int64) for e in extents]
    for boxes in Grid((rows, columns)).partition(extents):
        for owner, box in zip(owners, boxes, strict=True):
            owner[tuple(slice(lo, hi) for lo, hi in box.intervals())] += 1
    assert all((owner == 1).all() for owner in owners)


@given(sizes, st.integers(1, 4), st.integers(1, 8))
def test_strided_maps_are_cut_in_step(size: int, stride: int, pieces: int) -> None:
    if size < stride:
        return
    full = (size - 1) * stride + 1
    reference = cuts(size, pieces)
    assert [c for c in scaled_cuts(reference, full) if c < full] == [c * stride for c in reference if c * stride < full]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.data())
def test_a_window_needs_what_a_convolution_reads(
    size: int, kernel: int, stride: int, dilation: int, padding: int, data: st.DataObject
) -> None:
    reach = dilation * (kernel - 1) + 1
    if size + 2 * padding < reach:
        return
    outputs = (size + 2 * padding - reach) // stride + 1
    lo = data.draw(st.integers(0, outputs - 1))
    hi = data.draw(st.integers(lo + 1, outputs))
    x = torch.zeros(1, 1, size, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv1d(
        x, torch.ones(1, 1, kernel, dtype=torch.float64), stride=stride, padding=padding, dilation=dilation
    )
    y[..., lo:hi].sum().backward()
    assert x.grad is not None
    read = x.grad.flatten().nonzero().flatten().tolist()
    clip = Clip.at(*Window(kernel, stride, dilation, padding).need(lo, hi), size)
    assert not read or (clip.lo <= read[0] and read[-1] < clip.hi)
    assert 0 <= clip.lo < clip.hi <= size
    assert clip.hi - clip.lo + clip.before + clip.after == (hi - lo - 1) * stride + reach


def test_hull_and_intersection() -> None:
    a, b = Box((0, 2), (4, 6)), Box((2, 0), (8, 3))
    assert a.hull(b) == Box((0, 0), (8, 6))
    assert a.intersect(b) == Box((2, 2), (4, 3))
    assert a.hull(Box((9, 9), (9, 9))) == a
    assert a.hull(b).contains(a) and not a.contains(b)
    assert Box.whole((3, 4)).positions == 12 and a.shift((1, 1)) == Box((1, 3), (5, 7))
    assert a.intersect(Box((10, 10), (12, 12))).empty


@pytest.mark.parametrize("counts", [(), (0,), (2, -1)])
def test_a_grid_without_tiles_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one tile"):
        Grid(counts)


@given(some_boxes, some_boxes)
def test_boxes_are_sets_of_positions(a: Box, b: Box) -> None:
    mine, others = positions(a), positions(b)
    assert (a.positions, a.empty, a.ndim) == (len(mine), not mine, 2)
    assert a.extent == tuple(max(0, hi - lo) for lo, hi in a.intervals())
    assert positions(a.intersect(b)) == mine & others
    assert a.contains(b) == (others <= mine)
    joined = mine | others
    ends = [(min(p), max(p) + 1) for p in zip(*joined, strict=True)]
    assert positions(a.hull(b)) == positions(Box.of(ends) if joined else Box.whole((0, 0)))


def test_a_box_with_another_interval() -> None:
    box = Box((1, 2, 3), (4, 5, 6))
    assert box.replace(1, 7, 9) == Box((1, 7, 3), (4, 9, 6))
    assert str(box) == "[1:4 x 2:5 x 3:6]"
    assert Box.of([]) == Box((), ())
    with pytest.raises(ValueError, match="as many lower as upper"):
        Box((0,), (1, 2))


@given(some_boxes, st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_the_box_of_what_is_broadcast(box: Box, extent: tuple[int, int]) -> None:
    assert box.broadcast(extent) == Box.of((0, 1) if size == 1 else i for i, size in zip(box.intervals(), extent))


@given(st.integers(-9, 20), st.integers(1, 6), st.integers(1, 9))
def test_an_interval_outside_a_map_reads_one_position_of_it(lo: int, length: int, size: int) -> None:
    first, last = clip_interval(lo, lo + length, size)
    wanted = [p for p in range(lo, lo + length) if 0 <= p < size]
    if wanted:
        assert list(range(first, last)) == wanted
    elif lo >= size:
        assert (first, last) == (size - 1, size)
    assert 0 <= first < last <= size
    clip = Clip.at(lo, lo + length, size)
    assert (clip.lo - clip.before, clip.hi + clip.after) == (lo, lo + length)


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 9))
def test_cuts_of_a_given_length(size: int, pieces: int, step: int) -> None:
    ends = cuts(size, pieces, step)
    length = step or -(-size // pieces)
    assert ends == (*(min(size, i * length) for i in range(pieces)), size)
    few = nonempty_pieces(size, pieces)
    assert few == max(1, sum(a < b for a, b in pairwise(cuts(size, pieces))))


def test_maps_that_are_not_strided_are_cut_in_proportion() -> None:
    assert scaled_cuts((0, 4, 8, 10), 15) == (0, 6, 12, 15)
    assert scaled_cuts((0, 4, 8, 10), 20) == (0, 8, 16, 20)
    assert scaled_cuts((0, 4, 8, 10), 19) == (0, 8, 16, 19)  # a stride of two, after rounding
    assert scaled_cuts((0, 4, 8, 10), 10) == (0, 4, 8, 10)
    assert scaled_cuts((0, 0, 0), 3) == (0, 0, 3)
    assert reference_of([(8, 8), (4, 4), (1,), (2, 9)]) == (4, 4)
    assert reference_of([(9,), (2, 2, 2), (3, 3, 1)]) == (2, 2, 2)


def test_what_a_tile_owns_of_maps_of_fewer_axes() -> None:
    axes = [(0, 2, 5), (0, 3, 4)]
    assert box_at(axes, (1, 0)) == Box((2, 0), (5, 3))
    assert box_at(axes, (1,)) == Box((2, 0), (5, 3))
    assert box_at(axes[:1], (1, 0)) == Box((2,), (5,))
    assert box_at(axes[:1], (1, 1)).empty, "what has no such axis belongs to the first tile along it"


@pytest.mark.parametrize(
    "count,expected", [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (7, [0, 1, 2, 3, 5, 6]), (10, [0, 1, 4, 5, 8, 9])]
)
def test_tiles_that_may_differ(count: int, expected: list[int]) -> None:
    assert representative_indices(count) == expected


def test_tiles_of_given_sides() -> None:
    grid = Grid((3, 2), (4, 5))
    assert grid.tiles == 6 and str(grid) == "3x2"
    assert grid.ends([(10, 7), (20, 14)]) == [[(0, 4, 8, 10), (0, 5, 7)], [(0, 8, 16, 20), (0, 10, 14)]]
    assert Grid((3,)).ends([(10, 7)]) == [[(0, 4, 8, 10), (0, 7)]]
    assert list(Grid((2, 2)).indices()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(list(Grid((4,)).partition([(5,)]))) == 3, "no tile is without a position"
    for sides in ((4,), (4, 0), (4, 5, 6)):
        with pytest.raises(ValueError, match="sides"):
            Grid((3, 2), sides)
