"""Memory that each thread keeps for what it needs again at once: new memory costs as much as filling it."""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

_ALIGNED = 32  # bytes of a vector of AVX2
_kept = threading.local()


def scratch(use: str, *shape: int) -> NDArray[np.uint8]:
    """An array of bytes with anything in it, which the next call of this thread for the same use gives again.

    It is as large as the largest one that was asked for, so only ask for blocks and chunks, never for tiles.
    """
    size = math.prod(shape)
    memory: NDArray[np.uint8] | None = getattr(_kept, use, None)
    if memory is None or memory.size < size:
        memory = np.empty(size, np.uint8)
        setattr(_kept, use, memory)
    return memory[:size].reshape(shape)


def beside_alignment(use: str, *shape: int) -> NDArray[np.uint8]:
    """Memory of a thread like `scratch`, which begins half-way between two multiples of 32 bytes.

    libjpeg-turbo writes pixels past the processor's cache where they are aligned to 32 bytes. That halves its speed,
    and whoever reads them next waits for the memory.
    """
    return _beside(scratch(use, math.prod(shape) + _ALIGNED), shape)


def new_beside_alignment(*shape: int) -> NDArray[np.uint8]:
    """New memory that begins there, for pixels that are decoded to where they stay."""
    return _beside(np.empty(math.prod(shape) + _ALIGNED, np.uint8), shape)


def _beside(memory: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    start = (_ALIGNED // 2 - memory.ctypes.data) % _ALIGNED
    return memory[start : start + math.prod(shape)].reshape(shape)
