"""Files that appear whole or not at all, also after a power cut; locks on results."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from wsi_trainer.errors import UserError
from wsi_trainer.io import untrusted

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file, in parts, under its name once it is safe on the disk."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, KeyboardInterrupt) as error:
        partial.unlink(missing_ok=True)  # a full disk needs the room, and nobody looks for it after Ctrl-C
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # a write that fails names no file
        raise


def sha256_of(path: Path) -> str:
    """The hash of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object; its folder is made. What is no finite number is null."""
    write_text(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or an empty one where the file is not there."""
    if not path.is_file():
        return {}
    with as_written(path):
        return dict(untrusted.read_json(path))


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Errors within are said as what they come from: a file of the run that is damaged."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} is damaged, or of another version ({type(error).__name__}: {reason}); make it again, or remove it"
        ) from error


def finite(content: Any) -> Any:
    """JSON's values, with null for what is no finite number."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def save_picture(picture: Image.Image, path: Path, kind: str, **options: Any) -> None:
    """Writes a picture; the options are Pillow's for this kind of file.

    Pillow does not notice a full disk, so the picture is made in memory first.
    """
    made = io.BytesIO()
    picture.save(made, kind, **options)
    replace_file(path, made.getbuffer())


def save_array(values: NDArray[Any], path: Path) -> None:
    """Writes an array in NumPy's format."""
    import numpy as np

    made = io.BytesIO()
    np.save(made, values, allow_pickle=False)
    replace_file(path, made.getbuffer())


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
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def lock(path: Path, patience: float | None = None) -> Iterator[None]:
    """Keeps other processes away from something by a file; the system lifts the lock when this one dies.

    Args:
        path: The file.
        patience: Seconds to wait for it; `PATIENCE` by default.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = PATIENCE if patience is None else patience
    held = FileLock(path, timeout=waiting, poll_interval=0.1, thread_local=False)
    try:
        held.acquire()
    except Timeout as error:
        raise Locked(str(path)) from error
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise  # a disk without locks, as some networks have, keeps nobody away
    try:
        yield
    finally:
        held.release()


def remove(path: Path) -> None:
    """Removes a folder, or the link to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
