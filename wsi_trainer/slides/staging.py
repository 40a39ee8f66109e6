"""What lies beside the stores while a run goes on: locks, what is under construction, and what still has to be told.

A store that is ready is *due* until the tables of the folder have its row, and a run that dies between leaves a mark
that says so. Another run may write the tables meanwhile: it forgets a mark only if the store whose row it has read is
the one that the mark is about. A store that is replaced goes to one side until the new one has its name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from .store.manifest import NAME, sha256_of

STAGING = ".staging"
PATIENCE = 10.0
"""Seconds to wait for a lock: a process that was just killed may hold it for a moment."""
_DUE = ".due"
_DIGITS = 16
"""Of a seal."""
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


@dataclass(frozen=True)
class Due:
    """The mark of a store: its name, and the seal of that which had it, or was about to have it, when it was made."""

    name: str
    seal: str

    def path(self, out: Path) -> Path:
        return out / STAGING / f"{self.name}.{self.seal}{_DUE}"


def seal_of(store: Path) -> str:
    """What tells a store from others that had its name: a hash of its manifest, which has those of all of its files."""
    try:
        return sha256_of(store / NAME)[:_DIGITS]
    except (FileNotFoundError, NotADirectoryError):
        return ""


def note_due(out: Path, name: str, seal: str) -> None:
    """Notes that a store is about to appear, whose row the tables do not have yet."""
    path = Due(name, seal).path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def due(out: Path) -> list[Due]:
    """The stores that the tables have to be told of."""
    marks = sorted(path.relative_to(out / STAGING).as_posix().removesuffix(_DUE) for path in _find(out, _DUE))
    return [Due(*mark.rsplit(".", 1)) for mark in marks if "." in mark]


def settle(out: Path, told: Iterable[Due], others: Iterable[Due]) -> None:
    """Forgets marks of stores that the tables were ``told`` of. Of ``others`` no store was there: where nobody is at
    work on one, none will be, unless it has come since."""
    for mark in told:
        mark.path(out).unlink(missing_ok=True)
    for mark in others:
        try:
            with lock(out, mark.name, patience=0):
                if seal_of(out / f"{mark.name}.zarr") != mark.seal:
                    mark.path(out).unlink(missing_ok=True)
        except Locked:
            continue


def put_in_place(out: Path, name: str) -> None:
    """Gives a finished store its name. One that has it is removed when the new one is there, not before."""
    staged, store = out / STAGING / f"{name}.zarr", out / f"{name}.zarr"
    aside = out / STAGING / f"{name}.zarr{_ASIDE}"
    note_due(out, name, seal_of(staged))
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
    """What has this ending in the staging folder, without a look into stores."""
    for folder, inner, files in os.walk(out / STAGING):
        for name in [*inner, *files]:
            if name.endswith(ending):
                yield Path(folder) / name
        inner[:] = [name for name in inner if not name.endswith((".zarr", _ASIDE))]
