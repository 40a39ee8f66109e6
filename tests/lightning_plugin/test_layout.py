"""Layouts: a view of a map is the same view of every tile, whatever the shape."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Axis, Layout, canonical, plain_strides


@st.composite
def boxes(draw: st.DrawFn, extent: tuple[int, ...]) -> Box:
    lo = tuple(draw(st.integers(0, n - 1)) for n in extent)
    return Box(lo, tuple(draw(st.integers(a + 1, n)) for a, n in zip(lo, extent, strict=True)))


@given(st.data())
def test_views_and_permutations_commute_with_tiles(data: st.DataObject) -> None:
    extent = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    n, c = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4, 6]))
    x = torch.arange(n * c * extent[0] * extent[1]).view(n, c, *extent)
    layout = Layout.channels_first(x.shape)
    assert layout.extent == (extent if n == 1 else (*extent, n))
    extent = layout.extent
    box = data.draw(boxes(extent))
    tile = layout.narrow(x, Box.whole(extent), box)
    rows, columns = extent[:2]
    steps = [
        ("flat", (n, c, rows * columns)),
        ("rows", (n * c, rows, columns)),
        ("one", (n * c * rows * columns,)),
    ]
    name, shape = data.draw(st.sampled_from(steps))
    regrouped = layout.regroup(shape)
    assert regrouped is not None, name
    expected = regrouped.narrow(x.reshape(shape), Box.whole(extent), box)
    assert torch.equal(tile.reshape(regrouped.tile_shape(box)), expected)
    back = regrouped.regroup((n, c, rows, columns))
    assert back is not None
    assert torch.equal(back.narrow(x, Box.whole(extent), box), tile)


#: Dimensions of two axes, of an axis inside or outside a plain factor, and plain ones.
DIMS = [
    ((2, Axis(1)), (3,), (Axis(0),)),
    ((2, Axis(1)), (Axis(0), 3)),
    ((Axis(0), Axis(1)), (4,)),
    ((3,), (Axis(1), 2, Axis(0))),
    ((2,), (Axis(0),), (Axis(1),)),
]


@given(st.data(), st.sampled_from(DIMS))
def test_writing_and_adding_put_a_tile_at_its_box(
    data: st.DataObject, dims: tuple[tuple[int | Axis, ...], ...]
) -> None:
    extent = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    layout = Layout(dims, extent)
    held = data.draw(boxes(extent))
    lo = tuple(data.draw(st.integers(a, b - 1)) for a, b in held.intervals())
    box = Box(lo, tuple(data.draw(st.integers(a + 1, b)) for a, b in zip(lo, held.hi, strict=True)))
    whole = torch.zeros(layout.tile_shape(held))
    tile = torch.randn(layout.tile_shape(box))
    layout.write_into(whole, held, tile, box)
    assert torch.equal(layout.narrow(whole, held, box), tile)
    layout.add_into(whole, held, tile, box)
    assert torch.equal(layout.narrow(whole, held, box), 2 * tile)
    assert torch.isclose(whole.sum(), 2 * tile.sum(), atol=1e-4)
    part = layout.slicer(held, box)
    assert (part is None) == (held == box)
    assert part is None or torch.equal(part(whole), layout.narrow(whole, held, box))
    assert layout.empty(box, torch.float16, torch.device("cpu")).shape == tile.shape


def test_a_view_that_cuts_an_axis_has_no_layout() -> None:
    layout = Layout.channels_first((1, 3, 8, 8))
    assert layout.regroup((1, 3, 4, 2, 8)) is None
    assert layout.regroup((1, 3, 4, 16)) is None


def test_dimensions_of_images_are_axes_where_they_count_more_than_one() -> None:
    assert Layout.channels_first((1, 3, 8, 7)) == Layout(((1,), (3,), (Axis(0),), (Axis(1),)), (8, 7))
    assert Layout.channels_first((5, 3, 8, 7)) == Layout(((Axis(2),), (3,), (Axis(0),), (Axis(1),)), (8, 7, 5))
    bags = Layout.channels_first((2, 5, 3, 8, 7), 2)
    assert bags == Layout(((Axis(2),), (Axis(3),), (3,), (Axis(0),), (Axis(1),)), (8, 7, 2, 5))
    assert Layout.channels_first((1, 5, 3, 8, 7), 2).extent == (8, 7, 5)


def test_a_view_takes_factors_as_they_come() -> None:
    """Axes of one position stay somewhere, so that every box keeps all its axes."""
    layout = Layout(((Axis(2),), (6,), (Axis(0),), (Axis(1),)), (4, 1, 5))
    assert layout.regroup((5, 2, 3, 4, 1)) == Layout(((Axis(2),), (2,), (3,), (Axis(0),), (Axis(1),)), layout.extent)
    assert layout.regroup((30, 4)) == Layout(((Axis(2), 6), (Axis(0), Axis(1))), layout.extent)
    assert layout.regroup((1, 10, 12)) == Layout(((1,), (Axis(2), 2), (3, Axis(0), Axis(1))), layout.extent)
    assert layout.regroup((5, 6, 5)) is None and layout.regroup((5, 6, 4, 2)) is None
    assert layout.regroup((5, 6)) is None and layout.regroup((4, 30)) is None
    first = Layout(((Axis(0),), (2,), (Axis(1),)), (1, 3))
    assert first.regroup((1, 6)) == Layout(((Axis(0),), (2, Axis(1))), (1, 3))


def test_what_a_layout_says_of_its_dimensions() -> None:
    layout = Layout(((2, 3, Axis(1)), (1, Axis(0)), (4,), (Axis(2),)), (5, 6, 1))
    assert layout.shape == (36, 5, 4, 1)
    assert [layout.has_axis(d) for d in range(4)] == [True, True, False, True]
    assert layout.axis_dims == (0, 1, 3)
    assert [layout.axis_of(d) for d in range(4)] == [None, 0, None, 2]
    assert layout.normalized == Layout(((6, Axis(1)), (Axis(0),), (4,), (1,)), (5, 6, 1))
    assert layout.permute((3, 0, 2, 1)).shape == (1, 36, 4, 5)
    assert layout.with_dim(2, (7,)).shape == (36, 5, 7, 1)
    assert layout.with_extent((2, 2, 2)).shape == (12, 2, 4, 2)
    assert canonical((2, 1, 3, Axis(0), 2, 2), (5,)) == (6, Axis(0), 4)
    assert canonical((2, Axis(0), 3), (1,)) == (6,)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 1), (1, 1, 1, 1), (2, 3, 1, 4, 5), (2, 3, 4)])
def test_tiles_have_the_strides_that_pytorch_gives_them(shape: tuple[int, ...]) -> None:
    """Whatever the tensor was that they were cut from; one with gaps in memory is left as it is."""
    whole = torch.randn([n + 1 for n in shape])
    for order in permutations(range(len(shape))):
        apart = whole.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
        tile = apart[tuple(slice(n) for n in shape)]
        dense = apart.clone()[tuple(slice(n) for n in shape)].clone()
        for one in (tile, dense):
            found = plain_strides(one)
            assert torch.equal(found, one)
            if one.is_contiguous() and len(shape) > 3:
                assert found.stride() == torch.empty(shape).stride()
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    if len(shape) > 3 and min(shape[:2]) > 1:
        found = plain_strides(torch.randn(shape).contiguous(memory_format=last))
        assert found.stride() == torch.empty(shape, memory_format=last).stride()
