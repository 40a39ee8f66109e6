"""Faults of the machine, one test each: short reads, a full disk, no threads, no file descriptors, signals."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from tests.warm import start
from wsi_trainer.cli.commands import as_user_error
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.trainer import LogFile
from wsi_trainer.io.files import machine, remove_half_written, replace_file, save_array, save_picture
from wsi_trainer.io.tables import write_table
from wsi_trainer.models.weights import write_weights
from wsi_trainer.signals import Stopped, end_with_parent, ends_at_once, stops_once
from wsi_trainer.slide.formats.base import read_at
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
def test_short_reads_are_continued(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert read_at(fd, 600, 100) == content[100:700] and read_at(fd, 600, 900) == content[900:]
    finally:
        os.close(fd)


@pytest.mark.usefixtures("halved")
def test_a_slide_that_is_read_in_short_pieces_has_its_pixels(tmp_path: Path) -> None:
    """A decoder of JPEG would take half a tile for a grey one, and nobody would know."""
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    tifffile.imwrite(tmp_path / "s.tif", pixels, tile=(64, 64), photometric="rgb")
    with closing(TiffReader(tmp_path / "s.tif")) as reader:
        np.testing.assert_array_equal(reader.read(0, 0, 0, 128, 128), pixels)


def test_a_system_that_opens_no_more_files_is_no_broken_slide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile.imwrite(tmp_path / "s.tif", np.zeros((64, 64, 3), np.uint8), tile=(32, 32), photometric="rgb")

    def refuse(*args: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SlideError, match="Too many open files") as caught:
        TiffReader(tmp_path / "s.tif")
    assert "broken" not in str(caught.value)


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


def test_what_killed_processes_left_of_files_is_swept(tmp_path: Path) -> None:
    dead = 2**22 + 7  # more than Linux counts to
    (gone := tmp_path / f"m.csv.{machine()}.{dead}.1.part").touch()
    (alive := tmp_path / f"m.csv.{machine()}.{os.getpid()}.1.part").touch()
    (elsewhere := tmp_path / f"m.csv.00000000.{dead}.1.part").touch()
    (old := tmp_path / f"n.csv.00000000.{dead}.1.part").touch()
    os.utime(old, (0, 0))
    (users := tmp_path / "notes.part").touch()
    remove_half_written(tmp_path)
    assert [path.exists() for path in (gone, alive, elsewhere, old, users)] == [False, True, True, False, True]


def test_a_run_sweeps_its_folder_and_ctrl_c_leaves_nothing_to_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"plan.json.{machine()}.{2**22 + 7}.1.part").touch()
    with Run(tmp_path).locked():
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]

    def interrupted(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "plan.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "no room for another one"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "memory is short"),
        (MemoryError("Unable to allocate 1 GiB"), "memory is short: Unable to allocate 1 GiB"),
        (OSError("Unable to write: errno = 28"), "errno = 28"),
    ],
)
def test_the_limits_of_the_machine_are_no_faults_of_the_program(error: Exception, said: str) -> None:
    assert said in str(as_user_error(error))
    try:
        try:
            raise error
        except Exception:
            raise RuntimeError("cannot join thread before it is started")  # noqa: B904  # as a library cleans up
    except RuntimeError as later:
        if type(error) is not OSError:
            assert said in str(as_user_error(later))
    assert as_user_error(RuntimeError("contiguous memory format")) is None
    assert as_user_error(KeyError("memory")) is None
    of_hdf5 = "Can't decrement id ref count (unable to extend file properly, errno = 28, error message = 'No space')"
    assert "No space left on device" in str(as_user_error(RuntimeError(of_hdf5)))


def without_threads() -> None:
    """A worker of a pool, where the system gives no thread."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    end_with_parent()


def test_a_worker_that_gets_no_thread_ends_without_a_traceback(tmp_path: Path) -> None:
    process = start(tmp_path / "log", without_threads)
    process.join(30)
    assert process.exitcode == 1 and not (tmp_path / "log").read_text()


def stopped_twice() -> None:
    """In a process of its own: a while after a signal it ends, whatever it does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever runs the tests may ignore
    with ends_at_once(grace=60):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            print("at its end", flush=True)


def test_a_second_signal_does_not_break_off_the_end(tmp_path: Path) -> None:
    process = start(tmp_path / "log", stopped_twice)
    process.join(30)
    said = (tmp_path / "log").read_text()
    assert process.exitcode not in (0, None) and "at its end" in said and "Stopped: interrupted" in said, said


def stopped_again_after_the_work() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stops_once():
        try:
            try:
                with ends_at_once(grace=60):
                    signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGINT)
                print("at its end", flush=True)
        except Stopped as stop:
            print(stop, flush=True)


def test_a_signal_between_the_work_and_its_last_words_changes_nothing(tmp_path: Path) -> None:
    process = start(tmp_path / "log", stopped_again_after_the_work)
    process.join(30)
    assert process.exitcode == 0 and (tmp_path / "log").read_text() == "at its end\nended by SIGTERM\n"


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogFile(tmp_path / "log.txt")
    logger = logging.Logger("of a test")
    logger.addHandler(handler)
    handler.flush = full  # type: ignore[method-assign]
    for _ in range(3):
        logger.warning("something")
    said = capsys.readouterr().err
    assert said.count("the run goes on without") == 1 and "No space left" in said and "Traceback" not in said
    del handler.flush
    handler.close()
