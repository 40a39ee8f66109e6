"""What a format that is fuzzed consists of."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.mutations import BINARY, Mutation


class Unjudged(Exception):
    """The other library cannot read the changed file, or does not say what was asked."""


@dataclass(frozen=True)
class Target:
    """One format.

    Attributes:
        name: of the format.
        make: writes good files into an empty folder; returns those to begin with, each a file or a folder.
        read: what the project makes of a file.
        truth: what another library makes of a changed file; None where a success must be as before the change.
        kinds: how files are changed.
        among: of a folder, the files that may be changed.
        named: what an error must name; by default the file's name without its ending.
        after: what is done to the changed file, such as to seal it again: as somebody who means harm would.
    """

    name: str
    make: Callable[[Path], Sequence[Path]]
    read: Callable[[Path], Any]
    truth: Callable[[Path], Any] | None = None
    kinds: tuple[Mutation, ...] = BINARY
    among: str = "*"
    named: str = ""
    after: Callable[[Path], None] | None = None


def digest(value: Any) -> str:
    """The same for equal values, also of arrays and of numbers that are none."""
    return hashlib.sha256(pickle.dumps(_plain(value))).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, np.ascontiguousarray(value).tobytes())
    if isinstance(value, dict):
        return sorted((str(key), repr(_plain(each))) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [repr(_plain(each)) for each in value]
    return repr(value)
