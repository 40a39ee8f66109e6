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
_ASIDE = ".aside"


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
    """Gives a finished store its name. One that has it is removed when the new one is there, not before."""
    staged, store = out / STAGING / f"{name}.zarr", out / f"{name}.zarr"
    aside = out / STAGING / f"{name}.zarr{_ASIDE}"
    store.parent.mkdir(parents=True, exist_ok=True)
    if store.exists() or store.is_symlink():
        remove(aside)
        os.replace(store, aside)
    os.replace(staged, store)
    remove(aside)


def bring_back(out: Path, name: str) -> None:
    """Gives a store its name again where a run died while it was being replaced."""
    store, aside = out / f"{name}.zarr", out / STAGING / f"{name}.zarr{_ASIDE}"
    if not (aside.exists() or aside.is_symlink()):
        return
    if store.exists():
        remove(aside)
    else:
        os.replace(aside, store)


def set_aside(out: Path) -> list[str]:
    """The names of stores that a run which died had put to one side."""
    ending = f".zarr{_ASIDE}"
    return sorted(path.relative_to(out / STAGING).as_posix().removesuffix(ending) for path in _find(out, ending))


def remove(path: Path) -> None:
    """Removes a store, or the link to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _find(out: Path, ending: str) -> Iterator[Path]:
    """Files and folders with this ending in the staging folder, without a look into stores."""
    for folder, inner, files in os.walk(out / STAGING):
        for name in [*inner, *files]:
            if name.endswith(ending):
                yield Path(folder) / name
        inner[:] = [name for name in inner if not name.endswith((".zarr", _ASIDE))]
