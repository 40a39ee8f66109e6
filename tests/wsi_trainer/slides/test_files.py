"""Files that appear whole or not at all, whichever way they are written."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.wsi_trainer.slides.conftest import SMALL
from wsi_trainer.io import files
from wsi_trainer.io.files import BLOCK, LARGE, PIECE, replace_file, write_directly
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.identity import quick_hash

SIZES = [0, 1, BLOCK, LARGE - 1, LARGE, LARGE + 1, PIECE - BLOCK, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + BLOCK + 7]


def parts_of(size: int) -> tuple[bytes, ...]:
    """So many bytes in pieces of all lengths, none of them a multiple of a block."""
    data = os.urandom(size)
    cuts = sorted({0, size, min(size, 3), size // 3, size // 2 + 1, max(0, size - 5)} & set(range(size + 1)))
    return tuple(data[a:b] for a, b in pairwise(cuts))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(tmp_path: Path, size: int) -> None:
    parts = parts_of(size)
    replace_file(tmp_path / "file", *parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_large_files_go_past_the_cache_where_they_can(tmp_path: Path) -> None:
    parts = parts_of(LARGE + 1)
    if not write_directly(tmp_path / "direct", parts):
        pytest.skip(f"the disk of {tmp_path} cannot be written past the page cache")
    assert (tmp_path / "direct").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("where", ["open", "write", "short write"])
def test_a_disk_that_cannot_is_written_through_the_cache(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tmpfs in older kernels, disks with larger blocks, and file systems in user space."""
    met = []
    real_open, real_write = os.open, os.write

    def open_(path: Any, flags: int, *rest: Any) -> int:
        if where == "open" and flags & os.O_DIRECT:
            met.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    def write(fd: int, data: Any) -> int:
        met.append(fd)
        if where == "write":
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, data[:BLOCK]) if where == "short write" else real_write(fd, data)

    monkeypatch.setattr(files.os, "open", open_)
    monkeypatch.setattr(files.os, "write", write)
    parts = parts_of(LARGE + 1)
    replace_file(tmp_path / "file", *parts)
    assert met
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "write", full)
    if not write_directly(tmp_path / "probe", ()):
        pytest.skip(f"the disk of {tmp_path} cannot be written past the page cache")
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", *parts_of(LARGE))
    assert not (tmp_path / "file").exists()


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
