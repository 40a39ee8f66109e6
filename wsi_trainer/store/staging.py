"""Output folder of `preprocess`: names in it, locks, and the staging area of unfinished and of replaced stores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

STAGING = ".staging"
THUMBNAILS = "thumbnails"
ASSOCIATED = "associated"
NGFF04 = "ngff-0.4"
PATIENCE = 10.0
"""Seconds to wait for a lock: a process that was just killed may hold it for a moment."""


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def lock(out: Path, name: str, patience: float | None = None) -> Iterator[None]:
    """Keeps other processes away from something; the system lifts the lock when this one dies.

    Args:
        out: The folder of the stores.
        name: What it is.
        patience: Seconds to wait for another process; `PATIENCE` by default.
    """
    path = out / STAGING / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=PATIENCE if patience is None else patience, poll_interval=0.1, thread_local=False):
            yield
    except Timeout as error:
        raise Locked(str(path)) from error


def put_in_place(out: Path, name: str) -> None:
    """Gives a finished store its name. One that has it is moved aside first, and removed when the new one is there.

    Where a run dies in between, the next one finds the new store and its journal complete, and does the rest.
    """
    store, staged = out / f"{name}.zarr", out / STAGING / f"{name}.zarr"
    aside = staged.with_name(f"{staged.name}.aside")
    store.parent.mkdir(parents=True, exist_ok=True)
    if store.exists() or store.is_symlink():
        remove(aside)
        os.replace(store, aside)
    os.replace(staged, store)
    remove(aside)


def remove(path: Path) -> None:
    """Removes a store, or the link to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
