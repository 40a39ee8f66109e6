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
import torch

from lightning_plugin import Box
from wsi_trainer.errors import AbsentResolution, SlideError
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


def test_levels_and_resolutions(slide: Path, store: Path) -> None:
    assert Image(Slide.open(store), factor=2).shape == (1, 3, 519, 402)
    assert Image(Slide.open(store), mpp=1.0).shape == (1, 3, 519, 402)
    assert Image(Slide.open(store), mpp=1.0).mpp == pytest.approx((1.0, 1.0))
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


def test_damaged_chunk_names_the_file(store: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(store, tmp_path / "s.zarr")
    shard = next(p for p in sorted((tmp_path / "s.zarr" / "0" / "c").rglob("*")) if p.is_file())
    data = bytearray(shard.read_bytes())
    data[50] ^= 4
    shard.write_bytes(data)
    with pytest.raises(SlideError, match=r"s\.zarr: damaged: .*checksum"):
        Image(Slide.open(tmp_path / "s.zarr")).read(Box((0, 0), (1037, 803)))


def _loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The corner of every box that is decoded from now on."""
    loads: list[tuple[int, int]] = []
    read = ScaledImage.read_into

    def noting(self: ScaledImage, y: int, x: int, out: np.ndarray) -> None:
        loads.append((y, x))
        read(self, y, x, out)

    monkeypatch.setattr(ScaledImage, "read_into", noting)
    return loads


def test_prefetched_box_is_read_once(slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, plain = Image(Slide.open(slide), threads=2), Image(Slide.open(slide), threads=1, cache=0)
    box = Box((100, 100), (1000, 500))
    expected = plain.read(box)
    loads = _loads(monkeypatch)
    source.prefetch([box])
    source.prefetch([box])
    assert torch.equal(source.read(box), expected)
    assert len(loads) == len(set(loads)) == 2
    assert not source._waiting


def test_small_image_is_kept_from_the_second_reading(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Image(Slide.open(store), threads=2)
    first = source.read(Box((64, 64), (448, 448)))
    assert source._blocks.bytes == 0  # every block was read whole
    assert torch.equal(source.read(Box((64, 64), (448, 448))), first)
    loads = _loads(monkeypatch)
    assert torch.equal(source.read(Box((64, 64), (448, 448))), first)
    assert loads == []


def test_blocks_at_the_border_of_a_box_are_kept(slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Image(Slide.open(slide), threads=1)
    source.read(Box((0, 0), (512, 544)))
    loads = _loads(monkeypatch)
    source.read(Box((0, 544), (1037, 768)))
    assert loads == [(512, 512), (1024, 512)]


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


def _sum(source: Image | Bag) -> int:
    # Summed by numpy: the threads of torch do not survive a fork (a DataLoader gives its workers one each).
    boxes = [Box((0, 0, 0), (2, 50, 50))] if isinstance(source, Bag) else _boxes(source.shape, 8)
    return sum(int(source.read(box).numpy().sum()) for box in boxes)


@pytest.mark.parametrize("method", ["fork", "spawn"])
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak of memory from")
@pytest.mark.parametrize("kind", ["store", "slide"])
def test_memory_is_flat_over_epochs(
    slide: Path, store: Path, kind: str, count: Callable[..., int], record_result: Callable[..., None]
) -> None:
    reads = count(ci=400, full=10_000)
    command = [sys.executable, "-c", _EPOCHS, str(store if kind == "store" else slide), str(reads), "8"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, last = map(int, output.split())
    assert last - first < 30  # MiB
    record_result(f"read_memory_{kind}", {"reads": reads, "epochs": 8, "mib_after_one": first, "mib_after_all": last})
