"""Faults of the machine, one test each: short reads, a full disk, no threads, no file descriptors, signals."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from wsi_trainer.cli import as_user_error
from wsi_trainer.errors import UserError
from wsi_trainer.io.files import save_array, save_picture, write_text
from wsi_trainer.io.tables import write_table
from wsi_trainer.models.weights import write_weights
from wsi_trainer.slide.formats.tiff import TiffReader


def full(*args: object, **kwargs: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reads and writes less than it is asked for."""
    pread, write = os.pread, os.write
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, (count + 1) // 2, at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: (len(data) + 1) // 2]))


@pytest.mark.usefixtures("halved")
def test_a_slide_that_is_read_in_short_pieces_has_its_pixels(tmp_path: Path) -> None:
    """A decoder of JPEG would take half a tile for a grey one, and nobody would know."""
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    tifffile.imwrite(tmp_path / "s.tif", pixels, tile=(64, 64), photometric="rgb")
    with closing(TiffReader(tmp_path / "s.tif")) as reader:
        np.testing.assert_array_equal(reader.read(0, 0, 0, 128, 128), pixels)


def test_a_disk_that_is_full_is_named_by_the_file_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write that fails: without a name

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "report.html", "page")
    assert str(as_user_error(caught.value)) == f"{tmp_path / 'report.html'}: No space left on device"


@pytest.mark.parametrize("write", [
    lambda path: save_picture(Image.new("RGB", (9, 9)), path, "PNG"),
    lambda path: save_array(np.zeros(9), path),
    lambda path: write_table(path, ["a"], [["b"]]),
    lambda path: write_weights(path, {"a": torch.zeros(9)}),
])  # fmt: skip
def test_what_is_drawn_and_exported_is_there_whole_or_as_before(
    tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.x"
    path.write_bytes(b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        patch.setattr(Path, "replace", full)
        with pytest.raises((OSError, UserError), match="No space left"):
            write(path)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file.x"]
    write(path)
    assert path.read_bytes() != b"before" and os.listdir(tmp_path) == ["file.x"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "memory is short: CUDA out of memory"),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 288000 bytes. Error code 12"
            ),
            "memory is short: 288,000 bytes were asked for at once",
        ),
        (MemoryError("Unable to allocate 1 GiB"), "memory is short: Unable to allocate 1 GiB"),
        (OSError("Unable to write: errno = 28"), "errno = 28"),
    ],
)
def test_the_limits_of_the_machine_are_no_faults_of_the_program(error: Exception, said: str) -> None:
    assert said in str(as_user_error(error))
    assert as_user_error(RuntimeError("contiguous memory format")) is None
    assert as_user_error(KeyError("memory")) is None
    of_hdf5 = "Can't decrement id ref count (unable to extend file properly, errno = 28, error message = 'No space')"
    assert "No space left on device" in str(as_user_error(RuntimeError(of_hdf5)))
