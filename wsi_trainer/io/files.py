"""Files that appear whole or not at all, also after a power cut; locks on results."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image


_PARTIAL = re.compile(r"\.(?P<machine>[0-9a-f]{8})\.(?P<pid>\d+)\.\d+\.part$")
_OLD = 86400.0
"""Seconds after which no machine is still writing a file."""


def replace_file(path: Path, *parts: bytes | memoryview, partial: Path | None = None) -> None:
    """Writes a file under its name once it is safe on the disk.

    Args:
        path: The file.
        parts: Its content, in order.
        partial: The name that it has meanwhile, where no two write it at a time; by default one of this thread's own.
    """
    partial = partial or path.with_name(f"{path.name}.{machine()}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, KeyboardInterrupt):
        partial.unlink(missing_ok=True)  # a full disk needs the room, and nobody looks for it after Ctrl-C
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object; its folder is made. What is no finite number is null."""
    write_text(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def save_picture(picture: Image.Image, path: Path, kind: str, **options: Any) -> None:
    """Writes a picture; the options are Pillow's for this kind of file.

    Pillow does not notice a full disk, so the picture is made in memory first.
    """
    made = io.BytesIO()
    picture.save(made, kind, **options)
    replace_file(path, made.getbuffer(), partial=path.with_name(f"{path.name}.part"))


def save_array(values: NDArray[Any], path: Path) -> None:
    """Writes an array in NumPy's format."""
    import numpy as np

    made = io.BytesIO()
    np.save(made, values, allow_pickle=False)
    replace_file(path, made.getbuffer(), partial=path.with_name(f"{path.name}.part"))


@cache
def machine() -> str:
    """Eight letters for this machine: a folder may be worked on from several."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def remove_half_written(folder: Path) -> None:
    """Removes from a folder what processes that were killed while they wrote a file have left of it."""
    for path in folder.glob("*.part"):
        found = _PARTIAL.search(path.name)
        if found is None:
            continue
        ended = found["machine"] == machine() and not psutil.pid_exists(int(found["pid"]))
        with suppress(OSError):  # another process removes it too
            if ended or time.time() - path.stat().st_mtime > _OLD:
                path.unlink()


def sync_tree(path: Path) -> None:
    """Makes renames inside a folder and all folders in it durable."""
    for folder, _, _ in os.walk(path):
        sync_folder(Path(folder))


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    if os.name == "nt":
        return  # Windows opens no folder, and makes renames durable by itself
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


PATIENCE = 10.0
"""Seconds to wait for a lock: a process that was just killed may hold it for a moment."""
LOCKS = ".staging"
"""Folder of locks, and of unfinished stores, in a folder of results."""


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def lock(out: Path, name: str, patience: float | None = None) -> Iterator[None]:
    """Keeps other processes away from something; the system lifts the lock when this one dies.

    Args:
        out: A folder of results.
        name: Name of a result in it.
        patience: Seconds to wait for another process; `PATIENCE` by default.
    """
    path = out / LOCKS / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=PATIENCE if patience is None else patience, poll_interval=0.1, thread_local=False):
            yield
    except Timeout as error:
        raise Locked(str(path)) from error


def remove(path: Path) -> None:
    """Removes a folder, or the link to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
