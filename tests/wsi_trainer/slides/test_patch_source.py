"""A `Bag` reads each patch as it lies in the slide, and each block once."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.errors import SlideError
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Bag, along_blocks

SHAPE = (1037, 803)
BLOCK = 64


def pixels_of(store: Path) -> np.ndarray:
    """The slide in the middle of much glass."""
    found = zarr.open_array(store / "0", mode="r")[:]
    return np.pad(found, ((0, 0), (512, 512), (512, 512)), constant_values=255)


def patch(pixels: np.ndarray, corner: np.ndarray, size: int) -> Tensor:
    y, x = corner + 512
    return torch.from_numpy(pixels[:, y : y + size, x : x + size].copy())


def loads_of(source: Bag) -> Counter[tuple[int, int]]:
    """How often each block is decoded from now on."""
    found: Counter[tuple[int, int]] = Counter()
    load = source._blocks._load
    source._blocks._load = lambda cell: found.update([cell]) or load(cell)  # type: ignore[func-returns-value]
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), size=st.integers(1, 150), threads=st.sampled_from([1, 3]), cache=st.sampled_from([0, 1 << 28]))
def test_any_box_of_any_patches(store: Path, data: st.DataObject, size: int, threads: int, cache: int) -> None:
    corners = st.tuples(st.integers(-size - 5, SHAPE[0] + 5), st.integers(-size - 5, SHAPE[1] + 5))
    positions = np.array(data.draw(st.lists(corners, min_size=1, max_size=12)))
    source = Bag(Slide.open(store), positions, size, threads=threads, cache=cache)
    assert isinstance(source, TileSource) and source.shape == (len(positions), 3, size, size)
    pixels = pixels_of(store)
    for _ in range(3):
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, end)] * 2))) for end in (len(positions), size, size)]
        box = Box(tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))
        read = source.read(box)
        assert read.dtype == torch.uint8 and tuple(read.shape) == (box.extent[0], 3, *box.extent[1:])
        for number, part in zip(range(box.lo[0], box.hi[0]), read):
            whole = patch(pixels, positions[number], size)
            assert torch.equal(part, whole[:, box.lo[1] : box.hi[1], box.lo[2] : box.hi[2]])
        value = source.constant(box)
        assert value is None or (read == value[None, :, None, None]).all()


@pytest.mark.parametrize("stride", [20, 48, 100])
@pytest.mark.parametrize("tile", [1, 7, 1000])
def test_each_block_is_decoded_once(store: Path, stride: int, tile: int) -> None:
    size = 48
    rows, columns = np.meshgrid(np.arange(0, SHAPE[0] - size, stride), np.arange(0, SHAPE[1] - size, stride))
    positions = np.random.default_rng(0).permutation(np.stack([rows, columns], -1).reshape(-1, 2))
    ordered = along_blocks(positions, size, BLOCK, SHAPE)
    assert sorted(map(tuple, ordered)) == sorted(map(tuple, positions))
    room = (2 * -(-SHAPE[1] // BLOCK) + 2) * 3 * BLOCK**2  # two rows of blocks, and those at hand
    source = Bag(Slide.open(store), ordered, size, threads=1, cache=room)
    loads = loads_of(source)
    for start in range(0, len(ordered), tile):
        source.read(Box((start, 0, 0), (min(start + tile, len(ordered)), size, size)))
    assert loads and set(loads.values()) == {1}


def test_a_wide_slide_is_read_column_of_blocks_by_column() -> None:
    positions = np.array([[y, x] for y in (0, 64, 128) for x in range(0, 2000, 64)])
    ordered = along_blocks(positions, 10, 64, (192, 2000))
    assert (np.diff(ordered[:, 1]) >= 0).all()


def test_a_box_beyond_the_patches_is_refused(store: Path) -> None:
    source = Bag(Slide.open(store), np.array([[0, 0]]), 100)
    for box in (Box((0, 0, 0), (2, 10, 10)), Box((0, 0, 0), (1, 10, 101)), Box((0, 0), (10, 10))):
        with pytest.raises(SlideError, match="leaves the 1 patches of 100 x 100"):
            source.read(box)


def test_hundreds_of_thousands_of_patches_take_megabytes(store: Path) -> None:
    count = 300_000
    positions = np.random.default_rng(0).integers(0, 700, (count, 2), np.int32)
    tracemalloc.start()
    try:
        source = Bag(Slide.open(store), along_blocks(positions, 96, BLOCK, SHAPE), 96, threads=1, cache=0)
        for start in range(0, count, count // 10):
            source.read(Box((start, 0, 0), (start + 4, 96, 96)))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * 2**20 and peak < 32 * 2**20
