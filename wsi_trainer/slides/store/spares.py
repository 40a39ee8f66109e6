"""Arrays that are used again: the system clears new memory first, which costs as much as filling it."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

Planes = NDArray[np.uint8]

_MOST = 6  # arrays of one shape that are kept


class Spares:
    """Arrays of bytes that nobody needs any more, by their shape."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, ...], list[Planes]] = {}
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> Planes:
        """An array of this shape, with anything in it."""
        with self._lock:
            waiting = self._arrays.get(shape)
            if waiting:
                return waiting.pop()
        return np.empty(shape, np.uint8)

    def give(self, array: Planes | None) -> None:
        """Takes back an array that nobody will read or write again."""
        if array is None:
            return
        with self._lock:
            waiting = self._arrays.setdefault(array.shape, [])
            if len(waiting) < _MOST:
                waiting.append(array)
