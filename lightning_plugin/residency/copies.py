"""The copies of streamed tensors that one run has on the device; see [Note: streamed] in `homes`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.private import version
from lightning_plugin.residency.homes import Below
from lightning_plugin.residency.transfer import Arrivals, Pending, Transfer, TransferQueue, arriving


class Copies:
    """The copies of a run's streamed tensors, by the values that they are of.

    ``captured`` are the tensors themselves. Without ``below``, in a rehearsal, copies are room and no more.
    """

    def __init__(
        self, captured: Mapping[Value, Tensor], below: Below | None, queue: TransferQueue, ledger: Ledger | None
    ) -> None:
        self.captured = captured
        self.versions = {v: version(t) for v, t in captured.items()}
        self.below = below
        self.queue = queue
        self.ledger = ledger
        self.arrivals: Arrivals[Value] = Arrivals()
        self.living: dict[Value, weakref.ref[Tensor]] = {}

    def here(self, v: Value) -> Tensor | None:
        """What was made of a value and somebody still holds: a copy, or what is derived of copies."""
        ref = self.living.get(v)
        return None if ref is None else ref()

    def note(self, v: Value, tensor: Tensor) -> None:
        """A value is here, as long as somebody holds it."""
        self.living[v] = weakref.ref(tensor)

    def begin(self, v: Value) -> None:
        """Begin to fetch a copy, unless there is one."""
        if self.here(v) is None:
            self.arrivals.begin(v, lambda: self.fetching(v))

    def take(self, v: Value) -> Tensor:
        """A copy that nobody else has."""
        self.check(v)  # also of what was fetched ahead, and has waited
        return self.arrivals.take(v, lambda: self.fetching(v))

    def fetching(self, v: Value) -> Pending:
        tensor, below = self.captured[v], self.below
        with torch.no_grad(), watched(self.ledger):
            room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=v.device)
        if below is None:
            held = [room]
            return self.queue.send(Transfer(held, lambda: None, lambda: held[0]), ahead=False)
        return self.queue.send(arriving(room, lambda here: below.read(tensor, here)), ahead=True)

    def rest(self) -> None:
        """Nothing is fetched any more."""
        self.arrivals.rest()

    def check(self, v: Value) -> None:
        """Refuse to use a copy of what is not any more what the run began with."""
        if version(self.captured[v]) != self.versions[v]:
            raise RecordingError(
                f"a streamed parameter of shape {v.shape} was changed in place while a step that uses it was under way "
                "(an optimizer step between forward and backward, say). Its old value is needed: pull back before."
            )

    def lower(self, v: Value, gradient: Tensor) -> Tensor | None:
        """A gradient where its parameter lives. A rehearsal's tensors have theirs, which counts nowhere."""
        tensor = self.captured[v]
        return tensor.grad if self.below is None else self.below.lower(tensor, gradient)
