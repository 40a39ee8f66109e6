"""Reading before a step asks: the next tile of a slide, and the first of the slide after it.

[ahead] What a step reads is a function of the slide, of how it is shown and of the box, and of nothing that changes
meanwhile: how slides are ordered and augmented is drawn before (`sampling`, `augment`), and no generator is asked here.
So pixels that were read in another thread, earlier, are the pixels, and results are the same to the bit. What went
wrong is raised where the box is asked for, in the step of its slide. A box that was begun and is not what the step asks
for first is let go.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.data.passing import PassingSource

LIMIT = 128 << 20
"""Most bytes of one image that are read ahead."""


class AheadSource(PassingSource):
    """A `TileSource` that has another one read in a thread, from the file to the augmented pixels.

    It may be pickled, sent to a spawned process or used in a forked one; what was read ahead stays behind.

    Args:
        source: What is read; from several threads.
        limit: Most bytes that are read ahead; a larger box is read when it is asked for.

    Attributes:
        first: The box that was asked for first.
    """

    def __init__(self, source: TileSource, limit: int = LIMIT) -> None:
        self.source = source
        self.first: Box | None = None
        self._limit = limit
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._waiting: OrderedDict[Box, Future[Tensor]] = OrderedDict()
        self._begun: Box | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return AheadSource, (self.source, self._limit)

    def read(self, box: Box) -> Tensor:
        """The pixels of a box, which were read ahead, are on their way, or are read now."""
        self._here()
        with self._lock:
            found = self._waiting.pop(box, None)
            if self.first is None:
                self.first = box
            if self._begun is not None:  # it is the step's now, or was begun for nothing
                self._drop(self._begun)
                self._begun = None
        return self.source.read(box) if found is None else found.result()

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Starts to read boxes that will be asked for soon; the oldest that nobody asked for make room."""
        self._here()
        with self._lock:
            for box in boxes:
                if box == self._begun:
                    self._begun = None  # it was begun for this slide's own step
                elif box not in self._waiting:
                    self._submit(box)

    def begin(self, box: Box) -> None:
        """Starts to read the box that is likely to be asked for first, before the slide's own step has begun."""
        self._here()
        with self._lock:
            if self.first is None and self._begun is None and self._submit(box):
                self._begun = box

    def let_go(self) -> None:
        """Forgets all that was read ahead."""
        with self._lock:
            for box in list(self._waiting):
                self._drop(box)
            self._begun = None

    def forget(self) -> None:
        """Has the source let go of pixels, if it keeps any."""
        self.let_go()
        super().forget()

    def bytes_of(self, box: Box) -> int:
        """What the pixels of a box take."""
        lead = self.instances or 0
        images, channels = (1, self.shape[lead]) if lead else self.shape[:2]
        return images * channels * box.positions * self.dtype.itemsize

    def _submit(self, box: Box) -> bool:
        """Hands a box to the thread, unless it is larger than all that may be read ahead or there is no thread."""
        if self.bytes_of(box) > self._limit:
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        try:
            self._waiting[box] = self._thread.submit(self.source.read, box)
        except RuntimeError:  # the system gives no thread: the box is read when it is asked for
            return False
        while sum(map(self.bytes_of, self._waiting)) > self._limit:
            self._drop(next(iter(self._waiting)))
        return True

    def _drop(self, box: Box) -> None:
        gone = self._waiting.pop(box, None)
        if gone is not None:
            gone.cancel()

    def _here(self) -> None:
        """Begins anew in a forked process, where threads and locks of the parent are dead."""
        if self._process != os.getpid():
            self._begin_anew()


class FirstBoxes:
    """What steps ask for first: of an image that is as large as one before, what was asked for of that; of another,
    what was asked for of the image in its place on the slide before.

    A plan is made once for images of one size, and its tiles have the sides of those of other sizes near it. So this is
    what is asked for, most often; where it is not, nothing is lost but time in a thread.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Box] = {}

    def begin(self, before: Sequence[AheadSource], following: Sequence[AheadSource], room: int) -> None:
        """Starts to read the images of a slide.

        Args:
            before: The images of the slide whose step is under way.
            following: Those of the next one.
            room: Most bytes to read.
        """
        self._known |= {(i, *one.shape): one.first for i, one in enumerate(before) if one.first is not None}
        for i, (one, other) in enumerate(zip(before, following)):
            first = self._known.get((i, *other.shape), one.first)
            box = None if first is None else _inside(first, other)
            if box is not None and other.bytes_of(box) <= room:
                room -= other.bytes_of(box)
                other.begin(box)


def _inside(box: Box, source: AheadSource) -> Box | None:
    """What of a box lies in a source."""
    lead = source.instances or 0
    ends = (*source.shape[:lead], *source.shape[max(lead, 1) + 1 :])
    if len(ends) != box.ndim:
        return None
    inside = Box.of([(min(lo, end), min(hi, end)) for (lo, hi), end in zip(box.intervals(), ends)])
    return None if inside.empty else inside
