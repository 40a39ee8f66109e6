"""The bytes of a file as they come, in memory that a disk can take them from where they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .files import BLOCK, PIECE
from .spares import Spares

Bytes = NDArray[np.uint8]


def new_piece(shape: tuple[int, ...]) -> Bytes:
    """Memory that begins at a block."""
    memory = np.empty(math.prod(shape) + BLOCK, np.uint8)
    start = -memory.ctypes.data % BLOCK
    return memory[start : start + math.prod(shape)].reshape(shape)


class Pieces:
    """Bytes that are put one after the other, each copied once and while it is in the processor's cache.

    Its iterator gives them in parts that begin at blocks.
    """

    def __init__(self, spares: Spares | None = None) -> None:
        self._spares = spares or Spares(new_piece)
        self._pieces: list[Bytes] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, data: Bytes) -> None:
        """Puts bytes to the end."""
        while len(data):
            filled = self._length % PIECE
            if not filled:
                self._pieces.append(self._spares.take((PIECE,)))
            part = data[: PIECE - filled]
            self._pieces[-1][filled : filled + len(part)] = part
            self._length += len(part)
            data = data[len(part) :]

    def __iter__(self) -> Iterator[memoryview]:
        for number, piece in enumerate(self._pieces):
            yield piece[: self._length - number * PIECE].data

    def give_back(self) -> None:
        """Lets others use the memory."""
        for piece in self._pieces:
            self._spares.give(piece)
        self._pieces, self._length = [], 0
