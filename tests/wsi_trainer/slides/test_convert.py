"""Conversion: lossless, bounded, and the same after any interruption."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from lightning_plugin import Box
from tests.wsi_trainer.slides.conftest import SMALL
from wsi_trainer.cli import main
from wsi_trainer.errors import SlideError
from wsi_trainer.io import files
from wsi_trainer.slide import slide as slide_module
from wsi_trainer.slide.formats import open_format
from wsi_trainer.slide.formats.base import Reader, ReadOptions
from wsi_trainer.slide.identity import SlideId, hash_of_1_0
from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store.convert import Busy, Job, Settings, convert
from wsi_trainer.store.writer import halve


def _tree(root: Path) -> dict[str, str]:
    """Hashes of all files, locks apart."""
    files = (p for p in sorted(root.rglob("*")) if p.is_file() and p.suffix != ".lock")
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _level(store: Path, level: int = 0) -> np.ndarray:
    return zarr.open_array(store / str(level), mode="r")[:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "CMU-1-Small-Region.svs",
        "test3-DAPI-2-(387).ndpi",
        pytest.param("yb10kx5k.zstd.tiff", marks=pytest.mark.full),
        "XYC_LZW.ome.tiff",
    ],
)
def test_native_level_is_lossless(real_slides: Path, tmp_path: Path, name: str) -> None:
    convert(Job(real_slides / name, "s", mpp=0.5), tmp_path, Settings())
    with Slide.open(real_slides / name) as reader:
        original = np.moveaxis(reader.read(0, 0, 0, *reader.info.shape), 2, 0)
    assert np.array_equal(_level(tmp_path / "s.zarr"), original)
    known = json.loads((tmp_path / "s.zarr" / "zarr.json").read_text())["attributes"]["wsi_trainer"]
    assert known["source"]["sha256"] == hashlib.sha256((real_slides / name).read_bytes()).hexdigest()


def test_levels_are_means_of_the_one_before(slide: Path, tmp_path: Path) -> None:
    done = convert(Job(slide, "s"), tmp_path, SMALL, threads=3)
    assert (done.height, done.width, done.levels, done.mpp) == (1037, 803, 3, 0.5)
    for level in range(2):
        finer, coarser = (_level(tmp_path / "s.zarr", k) for k in (level, level + 1))
        assert np.array_equal(coarser, halve(finer))


def test_threads_do_not_change_a_bit(slide: Path, tmp_path: Path) -> None:
    for threads in (1, 4):
        convert(Job(slide, "s"), tmp_path / str(threads), SMALL, threads=threads)
    assert _tree(tmp_path / "1") == _tree(tmp_path / "4")


def test_resolution_is_resampled_exactly(slide: Path, tmp_path: Path) -> None:
    done = convert(Job(slide, "s"), tmp_path, replace(SMALL, mpp=1.3))
    with Slide.open(slide) as reader:
        image = ScaledImage(reader, 2.6)
        expected = np.moveaxis(image.read(0, 0, *image.shape), 2, 0)
    assert (done.height, done.width) == image.shape == (399, 309)
    assert done.mpp == pytest.approx(1.3)
    assert np.array_equal(_level(tmp_path / "s.zarr"), expected)
    with Slide.open(tmp_path / "s.zarr") as reader:
        assert reader.info.mpp == pytest.approx((1.3, 1.3))


def test_constant_background_is_absent_and_tissue_is_kept(slide: Path, store: Path) -> None:
    pixels = _level(store)
    mask = zarr.open_array(store / "labels" / "tissue" / "0", mode="r")[:].astype(bool)
    assert mask.shape == pixels.shape[1:]
    with Slide.open(slide) as reader:
        original = np.moveaxis(reader.read(0, 0, 0, *reader.info.shape), 2, 0)
    assert (pixels[:, ~mask] == 255).all()
    assert np.array_equal(pixels[:, mask], original[:, mask])
    stained = original.max(0).astype(int) - original.min(0) > 30
    assert (stained & ~mask).sum() < 0.01 * stained.sum()
    assert 0.2 < mask.mean() < 0.6
    files = len(list((store / "0" / "c").rglob("*")))
    assert files < 5 * 4 + 5  # the shards without tissue do not exist


def test_label_has_the_levels_of_the_image(store: Path) -> None:
    for level in range(3):
        image = zarr.open_array(store / str(level), mode="r")
        label = zarr.open_array(store / "labels" / "tissue" / str(level), mode="r")
        assert label.shape == image.shape[1:]
        assert set(np.unique(label[:])) == {0, 1}


def test_other_settings_need_overwrite(slide: Path, tmp_path: Path) -> None:
    convert(Job(slide, "s"), tmp_path, SMALL)
    with pytest.raises(SlideError, match="overwrite"):
        convert(Job(slide, "s"), tmp_path, replace(SMALL, mpp=1.0))
    done = convert(Job(slide, "s"), tmp_path, replace(SMALL, mpp=1.0), overwrite=True)
    assert done.mpp == 1.0


def test_slide_without_tissue_is_not_made_all_background(tmp_path: Path) -> None:
    import tifffile

    path = tmp_path / "glass.tif"
    tifffile.imwrite(path, np.full((600, 600, 3), 243, np.uint8), tile=(128, 128), photometric="rgb")
    with pytest.raises(SlideError, match="no tissue"):
        convert(Job(path, "s", mpp=0.5), tmp_path, replace(SMALL, background="constant"))
    assert convert(Job(path, "s", mpp=0.5), tmp_path, SMALL).tissue == 0


def test_two_processes_do_not_work_on_one_slide(slide: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.01)

    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(Busy):
            convert(Job(slide, "s"), tmp_path, SMALL)

    convert(Job(slide, "s"), tmp_path, SMALL, progress=meanwhile)


class _Killed(BaseException):
    pass


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, slide: Path, out: Path) -> bool:
    """Converts until the step-th rename or write to the journal; True if it ended before."""
    count = 0
    replace_, fsync = os.replace, os.fsync

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count >= step:  # from then on the process is dead: its other threads do nothing more
                raise _Killed
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(replace_))
        patch.setattr(os, "fsync", counted(fsync))
        try:
            convert(Job(slide, "s"), out, SMALL)
        except _Killed:
            return False
    return True


@pytest.mark.slow
def test_interrupted_at_every_step_and_rerun(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[..., int]
) -> None:
    """Each rename and each write to the journal is once the last thing that happened."""
    convert(Job(slide, "s"), tmp_path / "whole", SMALL)
    expected = _tree(tmp_path / "whole")
    stride = count(ci=17, full=1)
    step, ended = 1, False
    while not ended:
        out = tmp_path / str(step)
        ended = _interrupt_at(monkeypatch, step, slide, out)
        assert (
            ended
            or not (out / "s.zarr" / "manifest.json").exists()
            or _tree(out / "s.zarr")
            == {key.removeprefix("s.zarr/"): value for key, value in expected.items() if key.startswith("s.zarr/")}
        )
        convert(Job(slide, "s"), out, SMALL)
        assert _tree(out) == expected, f"interrupted at step {step}"
        step += stride
    assert step > 40


# -- files that appear whole or not at all, on every system


LINUX_ONLY = ("posix_fadvise", "posix_fallocate", "O_DIRECT", "pread", "preadv", "pwrite", "sched_getaffinity", "fork",
              "set_blocking", "sysconf", "getuid")  # fmt: skip


def test_slides_are_converted_and_read_where_the_system_has_less(
    slide: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS and Windows have: without these calls, and without /proc for whoever looks there."""
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.delattr(signal, "SIGHUP", raising=False)
    for _ in range(2):
        assert main(["preprocess", str(slide), str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 0
    with Image(Slide.open(slide)) as raw, Image(Slide.open(tmp_path / "slide.zarr"), threads=3) as stored:
        box = Box((100, 50), (900, 700))
        assert torch.equal(raw.read(box), stored.read(box))
    with ThreadPoolExecutor(4) as pool, Slide.open(slide) as opened:  # where a file has one position for all
        rows = range(0, 800, 40)
        parts = list(pool.map(lambda top: opened.read(0, top, 0, 40, 1037), rows))
        assert np.array_equal(np.concatenate(parts), opened.read(0, 0, 0, 800, 1037))


def test_every_folder_of_a_store_is_made_durable(slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    original = os.fsync

    def fsync(fd: int) -> None:
        if (place := Path(f"/proc/self/fd/{fd}")).is_dir():
            synced.add(os.readlink(place))
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    convert(Job(slide, "s"), tmp_path, SMALL)
    folders = {folder for folder, _, _ in os.walk(tmp_path / "s.zarr")}
    staged = str(tmp_path / ".staging" / "s.zarr")
    assert len(folders) > 10 and {folder.replace(str(tmp_path / "s.zarr"), staged) for folder in folders} <= synced


def test_the_hash_of_a_slide_is_the_same_under_every_python_and_any_name(tmp_path: Path) -> None:
    """It is kept in runs, stores and features: another one would call them all made from another file."""
    path = tmp_path / "slide.svs"
    path.write_bytes(np.arange(5 << 18, dtype="<u4").tobytes())
    assert hash_of_1_0(path) == "22f05eb90de07ec7252743571a982c504751769e7594274d69e74077353a6e3c"
    known = SlideId.of(path)
    assert known.hash == known.content == "56480c24a2d0dc68544462b74c6640dcbb02c2b78cb61bb713cab8dfdd51e66f"
    assert SlideId.of(path.rename(tmp_path / "other.svs")) == known


# -- a slide with a large empty canvas, cut to what was scanned: pixels and positions stay those of the slide


BOUNDS = (133, 210, 500, 301)  # y, x, height, width of a slide of 1037 x 803


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int, int, int] | None], None]:
    """Has files say which part of them was scanned."""

    def say(bounds: tuple[int, int, int, int] | None) -> None:
        def opened(path: Path, reader: str | None, options: ReadOptions) -> Reader:
            found = open_format(path, reader, options)
            found.info = replace(found.info, bounds=bounds)
            return found

        monkeypatch.setattr(slide_module, "open_format", opened)

    say(BOUNDS)
    return say


@pytest.mark.usefixtures("bounded")
def test_every_level_is_a_part_of_the_slides(slide: Path) -> None:
    with Slide.open(slide) as whole, Slide.open(slide, crop=True) as cropped:
        y, x = cropped.origin
        assert y <= 133 and x <= 210 and 133 - y < 16 and 210 - x < 16
        assert cropped.shape == (133 + 500 - y, 210 + 301 - x)
        assert cropped.transform.origin == (y, x) and cropped.transform.shape == whole.shape
        assert len(cropped.levels) == len(whole.levels) == 3
        for number, level in enumerate(cropped.levels):
            step = int(level.downsample)
            expected = whole.read(number, y // step, x // step, level.height, level.width)
            assert np.array_equal(cropped.read(number, 0, 0, level.height, level.width), expected)
        with pickle.loads(pickle.dumps(cropped)) as again:
            assert np.array_equal(again.read(0, 5, 6, 70, 80), cropped.read(0, 5, 6, 70, 80))


@pytest.mark.usefixtures("bounded")
def test_outline_lies_where_it_was_drawn(slide: Path, tmp_path: Path) -> None:
    ring = [[300, 200], [460, 200], [460, 360], [300, 360], [300, 200]]  # x, y in pixels of the slide
    (tmp_path / "slide.geojson").write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
    settings = Settings(chunk=64, shard=256, crop="bounds", tissue="geojson", geojson=tmp_path)
    convert(Job(slide, "s"), tmp_path / "out", settings)
    rows, columns = np.nonzero(zarr.open_array(tmp_path / "out" / "s.zarr" / "labels" / "tissue" / "0", mode="r")[:])
    with Slide.open(slide, crop=True) as cropped:
        y, x = cropped.origin
    assert abs(rows.min() + y - 200) <= 16 and abs(rows.max() + y - 360) <= 16
    assert abs(columns.min() + x - 300) <= 16 and abs(columns.max() + x - 460) <= 16
