"""Layouts: a view of a map is the same view of every tile, whatever the shape."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Axis, Layout


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


@given(st.data())
def test_writing_and_adding_put_a_tile_at_its_box(data: st.DataObject) -> None:
    extent = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    layout = Layout(((2, Axis(1)), (3,), (Axis(0),)), extent)
    whole = torch.zeros(layout.shape)
    box = data.draw(boxes(extent))
    tile = torch.randn(layout.tile_shape(box))
    layout.write_into(whole, Box.whole(extent), tile, box)
    assert torch.equal(layout.narrow(whole, Box.whole(extent), box), tile)
    layout.add_into(whole, Box.whole(extent), tile, box)
    assert torch.equal(layout.narrow(whole, Box.whole(extent), box), 2 * tile)
    assert torch.isclose(whole.sum(), 2 * tile.sum(), atol=1e-4)


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
