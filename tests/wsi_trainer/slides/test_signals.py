"""Told to end, a run ends with all its processes, loses nothing, and can be given again at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile

from wsi_trainer.cli import main

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
SIDE = 2000
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides that take some seconds each."""
    path = tmp_path_factory.mktemp("slides")
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    for name in NAMES:
        tifffile.imwrite(
            path / f"{name}.tif", pixels, photometric="rgb", tile=(256, 256), compression="zlib",
            resolution=(20000, 20000), resolutionunit="CENTIMETER",
        )  # fmt: skip
    return path


def _start(slides: Path, out: Path, workers: int) -> subprocess.Popen[str]:
    words = ["preprocess", str(slides), str(out), "--workers", str(workers), "--tissue", "none"]
    return subprocess.Popen(
        [sys.executable, "-m", "wsi_trainer", *words], start_new_session=True, preexec_fn=_interruptible,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _interruptible() -> None:
    """A run in the background of a shell, as these tests may be, would ignore an interrupt, as it should."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _members(session: int) -> list[int]:
    """The living processes of a session: the run's own, and all that it started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _wait_until_it_works(out: Path, process: subprocess.Popen[str], workers: int) -> None:
    """Until each worker has a slide under construction."""
    deadline = time.monotonic() + 60
    while len(list((out / ".staging").glob("*.journal"))) < min(workers, len(NAMES)) and process.poll() is None:
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.01)


def _seconds_until_all_ended(session: int) -> float:
    start = time.monotonic()
    while _members(session) and time.monotonic() - start < 60:
        time.sleep(0.02)
    assert _members(session) == [], "processes that do not end"
    return time.monotonic() - start


def _check_rerun(slides: Path, out: Path) -> None:
    """The same command at once: all converted, nobody is busy, and the stores are whole."""
    assert main(["preprocess", str(slides), str(out), "--workers", "2", "--tissue", "none"]) == 0
    assert main(["verify", str(out)]) == 0
    assert {path.stem for path in out.glob("*.zarr")} == set(NAMES)
    assert not list((out / ".staging").rglob("*.part"))


CASES = [
    ("SIGTERM", 2, 143),
    ("SIGKILL", 2, -9),
    pytest.param("SIGINT", 2, 130, marks=pytest.mark.full),
    pytest.param("SIGHUP", 2, 129, marks=pytest.mark.full),
    pytest.param("SIGTERM", 1, 143, marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers", "code"), CASES)
def test_a_signal_ends_everything(folder: Path, tmp_path: Path, name: str, workers: int, code: int) -> None:
    process = _start(folder, tmp_path / "out", workers)
    _wait_until_it_works(tmp_path / "out", process, workers)
    os.kill(process.pid, getattr(signal, name))
    _seconds_until_all_ended(process.pid)
    assert process.wait() == code
    said = process.stderr.read() if process.stderr else ""
    assert "Traceback" not in said
    assert (f"wsi-train: {'interrupted' if name == 'SIGINT' else f'ended by {name}'}" in said) == (name != "SIGKILL")
    if name in ("SIGTERM", "SIGKILL"):
        _check_rerun(folder, tmp_path / "out")
