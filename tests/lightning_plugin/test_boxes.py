"""The box algebra: partitions have one owner for every position, windows need what convolution reads."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin.boxes import Box, Clip, Grid, Window, cuts, scaled_cuts

sizes = st.integers(1, 60)


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
