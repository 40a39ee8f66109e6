"""Files of others: only regular ones, and read whole only where they are not too large."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from wsi_trainer.errors import UserError

_KINDS = {stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
_MIB = 1 << 20


class Unreadable(UserError, ValueError):
    """A file that cannot be read, for the reason given.

    It is a `ValueError` too, so that code which reads a part of something larger can say what is damaged.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.path, self.reason)


@dataclass(frozen=True)
class Limit:
    """A number that the user can raise with an environment variable, read each time: it holds in workers too."""

    variable: str
    default: float

    @property
    def value(self) -> float:
        text = os.environ.get(self.variable, "")
        try:
            value = float(text) if text else self.default
        except ValueError:
            value = math.nan
        if not value > 0:
            raise UserError(f"{self.variable}={text}: expected a number above 0")
        return value


TEXT = Limit("WSI_TRAIN_MAX_TEXT_MIB", 512)
"""A file that is read whole: JSON, YAML, XML, a table. Outlines of a million cells have about 300 MiB."""


def what_is(path: Path) -> str | None:
    """What stands at a path instead of a file or a folder, such as a pipe; None for these, and where nothing is."""
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG
    return next((name for test, name in _KINDS.items() if test(mode)), None)


def open_file(path: Path) -> BinaryIO:
    """Open a file to read bytes of it: a pipe would never end, and a device may do anything.

    Raises:
        Unreadable: It is no file.
        OSError: The system refuses.
    """
    if kind := what_is(path):
        raise Unreadable(path, f"is {kind} and not a file")
    return path.open("rb")


def read_bytes(path: Path, most: Limit = TEXT) -> bytes:
    """The content of a file, no more than the limit.

    Raises:
        Unreadable: It is no file, or too large.
        OSError: The system refuses.
    """
    with open_file(path) as file:
        length = os.fstat(file.fileno()).st_size
        check_length(path, length, most)
        data = file.read(length + 1)  # as much memory is asked for
        while more := file.read(len(data)) if len(data) > length else b"":  # it grows while it is read
            data += more
            check_length(path, len(data), most)
    return data


def check_length(path: Path, length: int, most: Limit) -> None:
    """Refuse a file of too many bytes."""
    if length > most.value * _MIB:
        found = math.ceil(length / _MIB)
        raise Unreadable(
            path, f"has {found} MiB, more than the limit of {most.value:g} for a file that is read whole; if that is "
            f"right, set {most.variable}={found} in the environment"
        )  # fmt: skip
