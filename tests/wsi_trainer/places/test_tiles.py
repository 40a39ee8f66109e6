"""Which positions of a map become tiles."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin import Box
from wsi_trainer.data.dataset import TissueMap
from wsi_trainer.explain.outputs import side_of_tiles, tiles, with_tissue
from wsi_trainer.slide.tissue import TissueMask


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_tissue_is_that_of_its_pixels(height: int, width: int, stride: int, scale: int, seed: int) -> None:
    coarse = tuple(max(1, round(side / scale)) for side in (height, width))  # as short as masks may be
    mask = TissueMask(np.random.default_rng(seed).random(coarse) < 0.1, scale)
    pixels = TissueMap(mask, (height, width), stride)
    expected = pixels.read(Box((0, 0), pixels.shape[2:]))[0, 0].numpy() > 0
    found = with_tissue(mask, stride, (expected.shape[0], expected.shape[1]), (height, width))
    np.testing.assert_array_equal(found, expected)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 400), st.integers(0, 99))
def test_every_position_with_tissue_is_in_one_tile(rows: int, columns: int, most: int, seed: int) -> None:
    lot = np.random.default_rng(seed)
    values, wanted = lot.normal(size=(rows, columns)), lot.random((rows, columns)) < 0.3
    size = (rows * 8 - 3, columns * 8 - 5)
    covered = np.zeros((rows, columns), dtype=int)
    found = list(tiles(values, 8, size, wanted, most))
    side = side_of_tiles(wanted, most)
    assert len(found) <= most or not wanted.any()
    for one in found:
        (left, top), (right, bottom) = one.rings[0][0], one.rings[0][2]
        assert right <= size[1] and bottom <= size[0]
        part = (slice(int(top) // 8, int(top) // 8 + side), slice(int(left) // 8, int(left) // 8 + side))
        covered[part] += 1
        inside = values[part][wanted[part]]
        assert one.measurements["largest value"] == inside.max()
        np.testing.assert_allclose(one.measurements["mean value"], inside.mean())
    assert (covered[wanted] == 1).all()
