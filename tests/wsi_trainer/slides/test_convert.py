"""Conversion: lossless, bounded, and the same after any interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from wsi_trainer.errors import SlideError, UnknownResolution
from wsi_trainer.io import files
from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.store.convert import STAGING, Busy, Job, convert
from wsi_trainer.store.settings import Settings
from wsi_trainer.store.writer import halve

SMALL = Settings(chunk=64, shard=256)


def _tree(root: Path) -> dict[str, str]:
    """Hashes of all files, locks apart."""
    files = (p for p in sorted(root.rglob("*")) if p.is_file() and p.suffix != ".lock")
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _level(store: Path, level: int = 0) -> np.ndarray:
    return zarr.open_array(store / str(level), mode="r")[:]


@pytest.mark.parametrize(
    "name", ["CMU-1-Small-Region.svs", "test3-DAPI-2-(387).ndpi", "yb10kx5k.zstd.tiff", "XYC_LZW.ome.tiff"]
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


def test_thumbnail_shows_the_mask(slide: Path, tmp_path: Path) -> None:
    from PIL import Image

    convert(Job(slide, "s"), tmp_path, SMALL)
    picture = np.asarray(Image.open(tmp_path / "thumbnails" / "s.jpg")).astype(int)
    green = (picture[..., 1] > picture[..., 0] + 60) & (picture[..., 1] > picture[..., 2] + 60)
    assert 0.001 < green.mean() < 0.1
    assert max(picture.shape) <= 1024


def test_second_run_has_nothing_to_do(slide: Path, tmp_path: Path) -> None:
    convert(Job(slide, "s"), tmp_path, SMALL)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s.zarr").rglob("*")}
    assert convert(Job(slide, "s"), tmp_path, SMALL).skipped
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "s.zarr").rglob("*")} == before


def test_other_settings_need_overwrite(slide: Path, tmp_path: Path) -> None:
    convert(Job(slide, "s"), tmp_path, SMALL)
    with pytest.raises(SlideError, match="overwrite"):
        convert(Job(slide, "s"), tmp_path, replace(SMALL, mpp=1.0))
    done = convert(Job(slide, "s"), tmp_path, replace(SMALL, mpp=1.0), overwrite=True)
    assert done.mpp == 1.0


def test_changed_source_does_not_continue_the_old_journal(slide: Path, tmp_path: Path, monkeypatch) -> None:
    copy = tmp_path / "slide.tif"
    data = slide.read_bytes()
    copy.write_bytes(data[:-1] + b"\1")
    _interrupt_at(monkeypatch, 6, copy, tmp_path / "out")
    copy.write_bytes(data)
    convert(Job(copy, "s"), tmp_path / "out", SMALL)
    convert(Job(copy, "s"), tmp_path / "fresh", SMALL)
    assert _tree(tmp_path / "out") == _tree(tmp_path / "fresh")


def test_unknown_resolution_and_missing_slide(real_slides: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownResolution, match="three-levels"):
        convert(Job(real_slides / "tiled-three-levels-no-mpp.tif", "s"), tmp_path, Settings())
    with pytest.raises(SlideError, match="does not exist"):
        convert(Job(tmp_path / "none.svs", "s"), tmp_path, Settings())
    assert not (tmp_path / "s.zarr").exists()


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


def test_interrupted_at_every_step_and_rerun(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[..., int]
) -> None:
    """Each rename and each write to the journal is once the last thing that happened."""
    convert(Job(slide, "s"), tmp_path / "whole", SMALL)
    expected = _tree(tmp_path / "whole")
    stride = count(ci=7, full=1)
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


def test_resumed_run_keeps_what_was_finished(slide: Path, tmp_path: Path, monkeypatch) -> None:
    _interrupt_at(monkeypatch, 40, slide, tmp_path)
    staged = tmp_path / STAGING / "s.zarr"
    kept = {p: p.stat().st_mtime_ns for p in staged.rglob("*") if p.is_file() and not p.name.endswith(".part")}
    assert len(kept) > 5
    names = {p.relative_to(staged) for p in kept}
    times = {p.relative_to(staged): t for p, t in kept.items()}
    convert(Job(slide, "s"), tmp_path, SMALL)
    after = {name: (tmp_path / "s.zarr" / name).stat().st_mtime_ns for name in names}
    untouched = sum(after[name] == times[name] for name in names)
    assert untouched >= len(names) - 2  # a shard without its line in the journal is made again


def test_file_that_was_cut_in_staging_is_made_again(slide: Path, tmp_path: Path, monkeypatch) -> None:
    _interrupt_at(monkeypatch, 40, slide, tmp_path)
    shard = next(p for p in (tmp_path / STAGING / "s.zarr" / "0").rglob("*") if p.is_file() and p.name.isdigit())
    shard.write_bytes(shard.read_bytes()[:100])
    convert(Job(slide, "s"), tmp_path, SMALL)
    convert(Job(slide, "s"), tmp_path / "fresh", SMALL)
    assert _tree(tmp_path / "s.zarr") == _tree(tmp_path / "fresh" / "s.zarr")


def test_full_disk_is_named_and_nothing_is_lost(slide: Path, tmp_path: Path, monkeypatch) -> None:
    import errno

    from wsi_trainer.preprocess.pool import Failure, attempt

    calls = 0
    fsync = os.fsync

    def full(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        outcome = attempt(partial(convert, out=tmp_path, settings=SMALL), Job(slide, "s"))
    assert isinstance(outcome, Failure)
    assert outcome.reason == "No space left on device"
    assert not (tmp_path / "s.zarr").exists()
    convert(Job(slide, "s"), tmp_path, SMALL)
    convert(Job(slide, "s"), tmp_path / "fresh", SMALL)
    assert _tree(tmp_path / "s.zarr") == _tree(tmp_path / "fresh" / "s.zarr")
