"""The bags of several slides as one."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_plugin import Box, TileSource


class JoinedSource:
    """A `TileSource` of several others, one behind the other along the first axis of their boxes.

    Of bags, (K, 3, size, size), that is the axis of instances; of features, (1, width, K, 1), the rows. Only the part
    that was read last keeps pixels: where reading goes on in another, the one before lets go of all that it has read
    ([one held]).

    [one held] A pass over tiles reads their boxes in order, and so goes through the parts once. A box that begins in
    one part and ends in the next reads one after the other.
    """

    def __init__(self, parts: Sequence[TileSource]) -> None:
        """Join sources.

        Args:
            parts: At least one, whose shapes differ in nothing but the joined axis.
        """
        self.parts = tuple(parts)
        self.instances: int | None = getattr(parts[0], "instances", None)
        self._axis = 0 if self.instances else 2
        lengths = [part.shape[self._axis] for part in parts]
        self._ends = list(accumulate(lengths))
        shapes = {part.shape[: self._axis] + part.shape[self._axis + 1 :] for part in parts}
        if len(shapes) > 1 or len({part.dtype for part in parts}) > 1:
            raise ValueError(f"sources of shapes {[part.shape for part in parts]} cannot be joined along one axis")
        first = parts[0].shape
        self.shape = (*first[: self._axis], self._ends[-1], *first[self._axis + 1 :])
        self._held: int | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedSource, (self.parts,)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, box: Box) -> Tensor:
        """The pixels of a box, which may lie in several parts."""
        pieces = list(self._pieces(box))
        if not pieces:  # a box without positions lies in no part
            return self.parts[0].read(Box((0, *box.lo[1:]), (0, *box.hi[1:])))
        with self._lock:  # another thread's read may be of a part that is about to forget
            return torch.cat([self._holding(number).read(own) for number, own in pieces], dim=self._axis)

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if all parts of the box are known to hold it alone."""
        common: Tensor | None = None
        for number, own in self._pieces(box):
            value = self.parts[number].constant(own)
            if value is None or (common is not None and not torch.equal(value, common)):
                return None
            common = value
        return common

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Passes on what will be asked for soon of the part that is held; of others nothing is read ahead."""
        with self._lock:
            wish = None if self._held is None else getattr(self.parts[self._held], "prefetch", None)
            if wish is not None:
                wish([own for box in boxes for number, own in self._pieces(box) if number == self._held])

    def _holding(self, number: int) -> TileSource:
        """A part to be read; the one that was read before forgets."""
        if self._held is not None and self._held != number:
            forget = getattr(self.parts[self._held], "forget", None)
            if forget is not None:
                forget()
        self._held = number
        return self.parts[number]

    def _pieces(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The parts that a box lies in, and its share of each in that part's own positions."""
        first, last = box.lo[0], box.hi[0]
        number = bisect_right(self._ends, first)
        while first < last:
            if number == len(self._ends):
                raise IndexError(f"{box} leaves the {self._ends[-1]} positions of {len(self.parts)} joined sources")
            begin = self._ends[number - 1] if number else 0
            end = min(last, self._ends[number])
            yield number, Box((first - begin, *box.lo[1:]), (end - begin, *box.hi[1:]))
            first, number = end, number + 1
