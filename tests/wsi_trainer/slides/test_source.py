"""An `Image` returns the pixels of the slide, from anywhere, with bounded memory."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.data.dataset import dense
from wsi_trainer.errors import AbsentResolution, SlideError
from wsi_trainer.slide.geometry import Resolution
from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.slide.views import Bag, Image


def _boxes(shape: tuple[int, ...], number: int, seed: int = 0) -> list[Box]:
    rng = np.random.default_rng(seed)
    boxes = []
    for _ in range(number):
        y, x = int(rng.integers(shape[2])), int(rng.integers(shape[3]))
        boxes.append(Box((y, x), (int(rng.integers(y, shape[2])) + 1, int(rng.integers(x, shape[3])) + 1)))
    return boxes


def test_constant_boxes_are_known_without_reading(store: Path) -> None:
    source = Image(Slide.open(store))
    source._blocks.get = None  # type: ignore[method-assign, assignment]
    known = [source.constant(Box((y, x), (y + 64, x + 64))) for y in range(0, 960, 64) for x in range(0, 704, 64)]
    values = [value for value in known if value is not None]
    assert 40 < len(values) < len(known)
    assert all(torch.equal(value, torch.tensor([255, 255, 255], dtype=torch.uint8)) for value in values)


def test_whole_images_lie_channel_by_channel(slide: Path) -> None:
    """oneDNN ends the process in the backward pass of narrow strided convolutions of pixels with channels together."""
    with Slide.open(slide) as opened:
        bag = Bag(opened, np.array([[0, 0], [64, 32]], np.int32), 48)
        for view in (Image(opened), bag):
            assert dense(view).is_contiguous() and dense(view).dtype == torch.uint8


def test_levels_and_resolutions(slide: Path, store: Path) -> None:
    assert Image(Slide.open(store), factor=2).shape == (1, 3, 519, 402)
    assert Image(Slide.open(store), mpp=1.0).shape == (1, 3, 519, 402)
    assert Image(Slide.open(store), mpp=1.0).resolution == Resolution(1.0, 1.0, "store")
    assert Image(Slide.open(slide), factor=4).shape == (1, 3, 260, 201)
    for path in (slide, store):
        with pytest.raises(AbsentResolution, match=r"mpp 0\.3 is finer and would invent pixels"):
            Image(Slide.open(path), mpp=0.3)
        source = Image(Slide.open(path), mpp=0.9)  # no level has it: a finer one is filtered down
        with Slide.open(path) as opened:
            expected = ScaledImage(opened, 1.8).read(30, 40, 200, 210)
        assert np.array_equal(source.read(Box((30, 40), (230, 250)))[0].permute(1, 2, 0).numpy(), expected)
        for box in _boxes(source.shape, 30, seed=3):
            assert source.constant(box) is None or (source.read(box) == 255).all()


def test_wrong_use_is_said(store: Path, tmp_path: Path) -> None:
    source = Image(Slide.open(store))
    with pytest.raises(SlideError, match="leaves"):
        source.read(Box((0, 0), (2000, 10)))
    with pytest.raises(SlideError, match="does not exist"):
        Image(Slide.open(tmp_path / "none.zarr"))


def test_a_closed_source_opens_again(slide: Path, store: Path) -> None:
    for path in (slide, store):
        source = Image(Slide.open(path))
        box = Box((10, 20), (300, 400))
        before = source.read(box)
        source.prefetch([box])
        source.close()
        assert source.slide._opened is None and source._blocks.bytes == 0
        assert torch.equal(source.read(box), before)
        source.close()


def _sum(source: Image | Bag) -> int:
    # Summed by numpy: the threads of torch do not survive a fork (a DataLoader gives its workers one each).
    boxes = [Box((0, 0, 0), (2, 50, 50))] if isinstance(source, Bag) else _boxes(source.shape, 8)
    return sum(int(source.read(box).numpy().sum()) for box in boxes)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_other_processes_read_the_same(slide: Path, store: Path, real_slides: Path, method: str) -> None:
    sources: list[Image | Bag] = [Image(Slide.open(path), threads=2) for path in (store, slide)]
    dicom = sorted((real_slides / "CMU-1-Small-Region_dicom").iterdir())[0]
    sources += [Image(Slide.open(slide, "openslide")), Image(Slide.open(dicom, "dicom"))]
    sources += [Bag(Slide.open(store), np.array([[500, 400], [10, 20]]), 50)]
    expected = [_sum(source) for source in sources]  # the parent has used its threads, files and locks
    with multiprocessing.get_context(method).Pool(2) as pool:
        for source, number in zip(sources, expected, strict=True):
            assert pool.map(_sum, [source] * 4) == [number] * 4
            assert _sum(pickle.loads(pickle.dumps(source))) == number


_EPOCHS = """
import sys
from pathlib import Path
import numpy as np
from lightning_plugin import Box
from wsi_trainer.slide import Slide
from wsi_trainer.slide.views import Image
reads, epochs = int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(0)
def epoch():
    source = Image(Slide.open(Path(sys.argv[1])), cache=2 << 20, threads=2)
    for _ in range(reads // epochs):
        y, x = rng.integers(0, 700), rng.integers(0, 500)
        source.read(Box((int(y), int(x)), (int(y) + 300, int(x) + 300)))
    source.close()
def peak():
    # Not getrusage: its peak survives exec and would be that of the test's own process.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024
epoch()
first = peak()
for _ in range(epochs - 1):
    epoch()
print(first, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak of memory from")
@pytest.mark.parametrize("kind", ["store", pytest.param("slide", marks=pytest.mark.full)])
def test_memory_is_flat_over_epochs(
    slide: Path, store: Path, kind: str, count: Callable[..., int], record_result: Callable[..., None]
) -> None:
    reads = count(ci=200, full=10_000)
    command = [sys.executable, "-c", _EPOCHS, str(store if kind == "store" else slide), str(reads), "8"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, last = map(int, output.split())
    assert last - first < 30  # MiB
    record_result(f"read_memory_{kind}", {"reads": reads, "epochs": 8, "mib_after_one": first, "mib_after_all": last})


# -- pixels are handed on in the order in which decoders make them, and are those that other readers see


@pytest.fixture(params=["slide", "store"])
def known(request: pytest.FixtureRequest) -> tuple[Path, torch.memory_format, torch.Tensor]:
    """A slide or a store, the order of what its decoder makes, and all its pixels as another reader sees them."""
    path: Path = request.getfixturevalue(request.param)
    if request.param == "slide":
        pixels = tifffile.imread(path, key=0)
    else:
        pixels = np.moveaxis(zarr.open_array(path / "0", mode="r")[:], 0, 2)
    order = torch.contiguous_format if request.param == "store" else torch.channels_last
    return path, order, torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]


def boxes(count: int, extent: tuple[int, ...]) -> list[Box]:
    rng = np.random.default_rng(7)
    lows = [tuple(int(rng.integers(end)) for end in extent) for _ in range(count)]
    return [Box(lo, tuple(int(rng.integers(a, end)) + 1 for a, end in zip(lo, extent))) for lo in lows]


def lies_as_said(tile: torch.Tensor, order: torch.memory_format) -> bool:
    """Whether a tile has the very strides that PyTorch gives a tensor of this order."""
    return tile.stride() == torch.empty(tile.shape, memory_format=order).stride()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache", [0, 1 << 28])
def test_boxes_lie_as_the_decoder_made_them(
    known: tuple[Path, torch.memory_format, torch.Tensor], cache: int, threads: int
) -> None:
    path, order, pixels = known
    source = Image(Slide.open(path), cache=cache, threads=threads)
    assert source.memory_format == order and source.dtype == torch.uint8
    assert source.shape == (1, 3, 1037, 803)
    assert source.resolution is not None and source.resolution.mean == pytest.approx(0.5)
    for box in boxes(30, (1037, 803)):
        source.prefetch([box])
        tile = source.read(box)
        assert torch.equal(tile, pixels[:, :, box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]])
        assert lies_as_said(tile, order), box
        value = source.constant(box)
        assert value is None or (tile == value[None, :, None, None]).all()


# -- a `Bag` reads each patch as it lies in the slide, and each block once


SHAPE = (1037, 803)


def pixels_of(store: Path) -> np.ndarray:
    """The slide in the middle of much glass."""
    found = zarr.open_array(store / "0", mode="r")[:]
    return np.pad(found, ((0, 0), (512, 512), (512, 512)), constant_values=255)


def patch(pixels: np.ndarray, corner: np.ndarray, size: int) -> Tensor:
    y, x = corner + 512
    return torch.from_numpy(pixels[:, y : y + size, x : x + size].copy())


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_a_box_beyond_the_patches_is_refused(store: Path) -> None:
    source = Bag(Slide.open(store), np.array([[0, 0]]), 100)
    for box in (Box((0, 0, 0), (2, 10, 10)), Box((0, 0, 0), (1, 10, 101)), Box((0, 0), (10, 10))):
        with pytest.raises(SlideError, match="leaves the 1 patches of 100 x 100"):
            source.read(box)


def test_failed_prefetch_is_raised_where_the_box_is_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Image(Slide.open(store), threads=2)
    box = Box((64, 64), (448, 448))

    def broken(self: ScaledImage, y: int, x: int, out: np.ndarray) -> None:
        raise SlideError(store, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(ScaledImage, "read_into", broken)
        source.prefetch([box])
        with pytest.raises(SlideError, match="gone"):
            source.read(box)
    assert source.read(box).shape == (1, 3, 384, 384)
