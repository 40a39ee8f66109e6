"""Files that appear whole or not at all, also after a power cut."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import platform
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

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
        parts: What is in it.
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
