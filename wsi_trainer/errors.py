"""Errors that a user can mend: shown as one line, without a traceback. Imports only the standard library."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

ASKED: ContextVar[bool] = ContextVar("debug", default=False)
"""Whether the user asked for all that is known of an error, with `--debug`."""


class UserError(Exception):
    """Something in the input is wrong: a file, a key or a value, named by the message with the way out.

    The command line prints the message as one line on stderr and ends with `exit_code`; with `--debug` it
    shows the traceback too. Raise it as `raise UserError(...) from error`, so that the cause is kept.

    Args:
        message: what is wrong, where, and what would be right. One line.
        exit_code: the exit code of the process.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


SMALL = 1 << 20
"""Bytes: a disk with less is full."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def about_disk(error: OSError, *folders: Path) -> str:
    """The file or the full disk that an error of the system is about; disks are looked for among these folders."""
    if error.filename is not None:
        return f"{os.fspath(error.filename)}: {error.strerror}"
    if error.errno not in FULL:
        return str(error.strerror)
    places = dict.fromkeys(str(path) for path in (*folders, Path.cwd(), Path(tempfile.gettempdir())))
    full = [path for path in places if Path(path).exists() and shutil.disk_usage(path).free < SMALL]
    return f"{error.strerror}: the disk of {' and of '.join(full) or 'some folder'} is full"


@contextmanager
def explain_full_disk(*folders: Path) -> Iterator[None]:
    """Raise a refusal of the system as a `UserError` that names the disk."""
    try:
        yield
    except OSError as error:
        if not error.strerror:
            raise
        raise UserError(about_disk(error, *folders)) from error


class SlideError(UserError):
    """A slide cannot be used, for the reason given."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.path, self.reason)


class UnsupportedSlide(SlideError):
    """A reader does not read this kind of slide, and another one may.

    Where a reader knows a reason for which the slide must not be read at all, it raises `SlideError`, and no other one
    is asked.

    Attributes:
        change: what a reader that does read it changes of its pixels; empty where nothing.
    """

    def __init__(self, path: Path | str, reason: str, change: str = "") -> None:
        super().__init__(path, reason)
        self.change = change

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.path, self.reason, self.change)


class AbsentResolution(SlideError):
    """A slide has no pixels of the resolution that was asked for, and they cannot be made of what it has."""


class UnknownResolution(SlideError):
    """Nothing plausible says how large a pixel is, and guessing would spoil training in silence."""
