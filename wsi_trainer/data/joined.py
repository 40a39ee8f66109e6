"""The bags, or the features, of several slides as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_plugin import Box
from wsi_trainer.slide.views import View, naming


class Joined(View):
    """Several views, one behind the other along the first axis of their boxes.

    Of bags, (K, 3, size, size), that is the axis of instances; of features, (1, width, K, 1), the rows. A pass over
    tiles reads their boxes in order, and so goes through the views once: where reading goes on in another view, the one
    before is closed, so that one slide's pixels are kept at a time.
    """

    def __init__(self, parts: Sequence[View]) -> None:
        """Join views whose shapes differ in nothing but the joined axis."""
        self.parts, first = tuple(parts), parts[0]
        self.instances, self.dtype, self.memory_format = first.instances, first.dtype, first.memory_format
        self._axis = 0 if self.instances else 2
        self._ends = list(accumulate(part.shape[self._axis] for part in parts))
        shapes = {part.shape[: self._axis] + part.shape[self._axis + 1 :] for part in parts}
        if len(shapes) > 1 or len({part.dtype for part in parts}) > 1:
            raise ValueError(f"sources of shapes {[part.shape for part in parts]} cannot be joined along one axis")
        self.shape = (*first.shape[: self._axis], self._ends[-1], *first.shape[self._axis + 1 :])
        self._held: int | None = None
        super().__init__(first.name)

    def load(self, box: Box) -> Tensor:
        """The pixels of a box, which may lie in several parts."""
        pieces = list(self._pieces(box))
        if not pieces:  # a box without positions lies in no part
            return self.parts[0].load(Box((0, *box.lo[1:]), (0, *box.hi[1:])))
        with self._lock:  # another thread may read a part that is about to be closed
            return torch.cat([self._part(number, own) for number, own in pieces], dim=self._axis)

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if all parts of the box are known to hold it alone."""
        values = [self.parts[number].constant(own) for number, own in self._pieces(box)]
        first = values[0] if values else None
        return first if all(v is not None and first is not None and torch.equal(v, first) for v in values) else None

    def close(self) -> None:
        super().close()
        for part in self.parts:
            part.close()

    def _part(self, number: int, box: Box) -> Tensor:
        if self._held is not None and self._held != number:
            self.parts[self._held].close()
        self._held = number
        with naming(self.parts[number].name, box):
            return self.parts[number].load(box)

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
