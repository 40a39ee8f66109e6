"""Files that appear whole or not at all, also after a power cut.

Large ones are written past the system's page cache where that can be done: they are written once and not read soon, and
copying them into the cache costs many times what writing them does, and drives out the slides that are being read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import mmap
import os
import platform
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image


#: Files from this size on go past the cache.
LARGE = 1 << 20
#: What is written at once, and what its length and its place in memory have to be a multiple of.
PIECE, BLOCK = 1 << 22, 4096

_PARTIAL = re.compile(r"\.(?P<machine>[0-9a-f]{8})\.(?P<pid>\d+)\.\d+\.part$")
_OLD = 86400.0
"""Seconds after which no machine is still writing a file."""


def replace_file(path: Path, *parts: bytes | memoryview, partial: Path | None = None) -> None:
    """Writes a file under its name once it is safe on the disk.

    Args:
        path: The file.
        parts: What is in it.
        partial: The name that it has meanwhile, where no two write it at a time; by default one of this thread's own.
    """
    partial = partial or path.with_name(f"{path.name}.{machine()}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        if sum(map(len, parts)) < LARGE or not write_directly(partial, parts):
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


def write_directly(path: Path, parts: tuple[bytes | memoryview, ...]) -> bool:
    """Writes a file past the page cache, or says that this system or this disk cannot."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o666)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    try:
        room = memoryview(mmap.mmap(-1, PIECE))  # begins at a block, as memory that is mapped does
        for length in gather(parts, room):
            whole = -(-length // BLOCK) * BLOCK
            if os.write(fd, room[:whole]) != whole:  # the rest would not begin at a block
                return False
        os.ftruncate(fd, sum(map(len, parts)))
        os.fsync(fd)
    except OSError as error:
        if error.errno == errno.EINVAL:  # blocks of another size
            return False
        raise
    finally:
        os.close(fd)
    return True


def gather(parts: tuple[bytes | memoryview, ...], room: memoryview) -> Iterator[int]:
    """Fills the room again and again with what comes next, and says how much is in it: less only at the end."""
    filled = 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            count = min(len(rest), len(room) - filled)
            room[filled : filled + count] = rest[:count]
            filled, rest = filled + count, rest[count:]
            if filled == len(room):
                yield filled
                filled = 0
    if filled:
        yield filled


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
