"""Files that appear whole or not at all, on every system."""

from __future__ import annotations

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_plugin import Box
from tests.wsi_trainer.slides.conftest import SMALL
from wsi_trainer.cli import main
from wsi_trainer.io.files import replace_file
from wsi_trainer.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.identity import quick_hash

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


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"content")
    assert not list(tmp_path.iterdir())


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


def test_the_quick_hash_of_a_slide_is_the_same_under_every_python(tmp_path: Path) -> None:
    """It is kept in stores and in features: another one would call them all made from another file."""
    path = tmp_path / "slide.svs"
    path.write_bytes(np.arange(5 << 18, dtype="<u4").tobytes())
    assert quick_hash(path) == "22f05eb90de07ec7252743571a982c504751769e7594274d69e74077353a6e3c"
