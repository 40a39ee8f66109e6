"""Buffers that a recording has still to write.

[Note: buffers] A train-mode BatchNorm moves its running statistics when it is called. Recorded, it moves them when the
batch's statistics are known, which may be much later, or never, where the result is dropped. So such a buffer *awaits*
its update: until then it is a tensor of a class of its own, whose first operation, whatever it is (a copy, a reset, a
``state_dict``), first runs the recording. Nobody can see the buffer as it was before, and no update is lost. When the
update has happened, or the run of the recording has failed, the very same tensor is an ordinary one again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from lightning_plugin.trees import tree_leaves


class Writer(Protocol):
    """The recording that has still to write a buffer."""

    @property
    def alive(self) -> bool: ...
    def root(self) -> Any: ...
    def flush(self) -> None: ...
    def absorb(self, other: Any) -> None: ...


class AwaitingBuffer(Tensor):
    """A buffer whose update is recorded and has not happened yet."""

    _writer: Writer

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        settle_buffers((args, kwargs))
        return func(*args, **(kwargs or {}))


def await_update(buffer: Tensor, writer: Writer) -> None:
    """From now on a buffer awaits its update by a recording. One of a class of the user's stays what it is."""
    if type(buffer) is Tensor:
        buffer.__class__ = AwaitingBuffer
    if isinstance(buffer, AwaitingBuffer):
        buffer._writer = writer


def ordinary(buffers: Iterable[Tensor]) -> None:
    """Buffers are ordinary tensors again: their update is about to happen."""
    for buffer in buffers:
        if isinstance(buffer, AwaitingBuffer):
            del buffer._writer
            buffer.__class__ = Tensor  # type: ignore[assignment]


def settle_buffers(tree: Any, within: Writer | None = None) -> None:
    """Have the updates happen that buffers among some arguments await. An update that the recording ``within`` will
    make itself is awaited still; a recording of which somebody holds results becomes part of it."""
    for t in tree_leaves(tree):
        if not isinstance(t, AwaitingBuffer):
            continue
        writer = t._writer.root()
        if within is not None and (writer is within or writer.alive):
            within.absorb(writer)
        else:
            writer.flush()
