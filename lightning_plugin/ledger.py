"""The ledger: bytes that are live on the device during a step.

A ledger watches the operators and counts the storages they make, each once, until it dies. Operators that autograd
runs by itself, between segments, are seen through hooks. What existed before the step (the user's own tensors) is not
counted as made by it; parameters, and gradients that exist already, are what the ledger starts with.

[Note: watched] Watching an operator takes longer than many an operator does. Tiles of one kind hold the same: the first
of each kind is watched, and of the others only what outlives its segment (boundaries, cotangents, results), each by
itself. The first may have less beside it than those after it, since it makes what they add to; so a tile is watched
again where more is live when it begins than when one of its kind was watched before. What a pass over tiles has held
beyond what lay there is kept with what was found of its tiles; a pass like it in a later step is taken
to hold as much, and none of its tiles is watched (a ledger that is ``thorough`` watches all the same). Where something
of a tile may be there when the next begins (transfers and reads ahead, ranks that exchange, scans), all tiles are
watched; where it depends on an image's pixels how many tiles are computed, or on a source what reading takes, the first
of each kind is, in every step.

[Note: allocator] On CUDA no tile is watched. There the ledger counts what outlives a segment, which is what may be
beside a later call, and the allocator knows the peak: the most that it gave out since the step began, less what was
there before and is not the step's. So the peak has in it whatever else the process makes on the device meanwhile.

[Note: step] A step may have several calls, images and losses, and its budget is for all of them. What one call has left
on the device (what its backward still needs, results that somebody holds, another network's parameters) is *beside* the
next: that one is planned with what is left of the budget, and the peak goes on. A step is over when nothing is beside.

[Note: sums] Where several functions of one backward pass give a leaf its gradient (an image that two calls read, a
weight that two networks share), autograd adds the second to the first before the third comes, and the leaf gets the sum
at the end. The sum is made between functions, where no ledger looks; and it is a new tensor, as the first gradient is
one that a ledger has seen, to which autograd does not add in place. So from the second on there is a tensor more than
was counted, until the leaf has it. To the sum, which nobody has seen, the others are added in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_plugin.memory import Heap
from lightning_plugin.private import (
    DEVICE_OF,
    FakeTensor,
    TorchDispatchMode,
    current_pass,
    dispatch_mode,
    refuse_batched,
    schema,
    storage_key,
    tree_leaves,
)


@dataclass(eq=False)
class Sums:
    """The bytes of sums that wait in the pass under way: by the leaf, 0 where one gradient came so far; and in all."""

    waiting: dict[int, int] = field(default_factory=dict)
    total: int = 0
    began_in: int = -1

    @property
    def held(self) -> int:
        """The bytes of all sums."""
        self.forget()
        return self.total

    def forget(self) -> None:
        """Drop the sums of an earlier pass: they are gone with it."""
        if self.began_in != (now := current_pass()):
            self.waiting.clear()
            self.total = 0
            self.began_in = now

    def arrives(self, leaf: Tensor, size: int) -> None:
        """A gradient of a leaf was made."""
        self.forget()
        known = self.waiting.get(id(leaf))
        self.waiting[id(leaf)] = 0 if known is None else size
        self.total += 0 if known is None else size - known

    def taken(self, leaf: Tensor) -> None:
        """A leaf has got its gradient."""
        self.total -= self.waiting.pop(id(leaf), 0)

    def coming(self, leaves: Iterable[Tensor]) -> int:
        """The bytes of the sums that one more gradient of each leaf will make."""
        self.forget()
        return sum(t.nbytes for t in {id(t): t for t in leaves}.values() if self.waiting.get(id(t)) == 0)


@dataclass
class Most:
    """The most that a block needed."""

    size: int = 0


class CallBytes(NamedTuple):
    """The bytes of one call that is run whole.

    Args:
        weights: For each tensor that the call uses, by identity: the tensor and all that goes with it.
        saved: For its backward.
        gradients: Of its images.
        workspaces: Reserved by its plan for the device's libraries.
    """

    weights: Mapping[int, int]
    saved: int
    gradients: int
    workspaces: int = 0


class Ledger:
    """Bytes alive now and at the worst moment.

    In planning it counts the storages of fake tensors (``fakes``). ``limit`` is the budget, where one is kept, and
    ``heap`` the memory of the process, where it is looked after.
    """

    #: Watch tile passes in every step, also those whose peak is known.
    thorough: ClassVar[bool] = False

    def __init__(self, device: torch.device | None = None, fakes: bool = False) -> None:
        self.live = self.peak = 0
        self.device = device or torch.device("cpu")
        self.fakes = fakes
        self.limit: int | None = None
        self.watcher = Watcher(self)
        self.heap: Heap | None = None
        self._refs: dict[int, tuple[Any, int]] = {}
        self._foreign = 0
        self.sums = Sums()
        #: The calls whose graph is alive, by the step that each holds.
        self.calls: WeakKeyDictionary[object, CallBytes] = WeakKeyDictionary()

    def begin(self) -> None:
        """A step begins: its peak counts from what is live now."""
        self.peak = self.live
        if self.allocator:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._foreign = torch.cuda.memory_allocated(self.device) - self.live

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor that the step starts with, and the gradient it has already."""
        before = self.live
        for t in with_gradients([tensor]):
            self.see(t)
        self._foreign -= self.live - before

    def whole_step(self, *more: CallBytes) -> int:
        """Bytes with which the calls that wait for backward, and some that are still to come, can all be run whole: no
        plan takes more, however much room the first of them find."""
        calls = [*self.calls.values(), *more]
        weights = {key: size for call in calls for key, size in call.weights.items()}
        # The gradients of maps in the backward of a call are at most what it saves once more.
        maps = sum(call.saved + call.gradients for call in calls) + max(call.saved for call in calls)
        return sum(weights.values()) + maps + max(call.workspaces for call in calls)

    def beside(self, tensors: Iterable[Tensor]) -> int:
        """Bytes live beside some tensors and their gradients: see [Note: step]."""
        storages = {storage_key(t) for t in with_gradients(tensors)}
        return self.live - sum(self._refs[key][1] for key in storages if key in self._refs)

    @property
    def allocator(self) -> bool:
        """True if the device's own allocator knows the peak: see [Note: allocator]."""
        return self.device.type == "cuda" and not self.fakes

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._refs or (storage.device.type == "meta") != self.fakes:
            return
        if tensor.device.type != self.device.type:
            return  # what lies on the host below a device is not the device's
        storage_bytes = storage.nbytes()
        if not storage_bytes:
            return
        self._refs[key] = weakref.ref(storage, partial(self._gone, key)), storage_bytes
        self.live += storage_bytes
        if self.heap is not None and self.heap.is_due:
            self.settle()
        held = self.live + self.sums.held
        if held > self.peak:
            self.peak = held

    def settle(self) -> None:
        """Have the process keep not much more than is live: see [Note: heap] in `memory`."""
        if self.heap is not None:
            self.heap.trim(self.live)

    @contextmanager
    def measured(self) -> Iterator[Most]:
        """A block of which it is found out how much it needs beyond what is live when it begins."""
        before, peak = self.held, self.peak
        found, self.peak = Most(), self.held
        try:
            yield found
        finally:
            found.size = self.peak - before
            self.peak = max(peak, self.peak)

    def expect(self, size: int) -> None:
        """Count ``size`` bytes beyond the live ones for a moment: a pass that is not watched needs them."""
        self.peak = max(self.peak, self.held + size)

    @property
    def held(self) -> int:
        """Bytes live now, with sums that wait for a leaf: see [Note: sums]."""
        return self.live + self.sums.held

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage, which existed before."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, partial(self._gone, key)), 0

    def discount(self, tensor: Tensor) -> None:
        """A tensor's storage is not the device's any more, or its memory is counted elsewhere."""
        self._gone(storage_key(tensor))

    @property
    def peak_bytes(self) -> int:
        """The most that was live until now."""
        if self.allocator:
            return max(self.peak, torch.cuda.max_memory_allocated(self.device) - self._foreign)
        return self.peak

    @property
    def excess(self) -> int:
        """Bytes that the step has taken beyond its budget until now: workspaces of the device's libraries, which nobody
        knows before they are there."""
        return max(0, self.peak_bytes - self.limit) if self.allocator and self.limit is not None else 0

    def _gone(self, key: int, _: Any = None) -> None:
        found = self._refs.pop(key, None)
        if found is not None:
            self.live -= found[1]
            if self.heap is not None:
                self.heap.freed += found[1]

    def hook(self, tensor: Tensor, until: Iterable[Any] = ()) -> None:
        """Count the gradients that autograd makes on its way back through a tensor's operator, down to the functions
        ``until`` which its inputs were made."""
        if tensor.grad_fn is None:
            return
        stack, seen = [tensor.grad_fn], set(until)
        while stack:
            function = stack.pop()
            if function in seen:
                continue
            seen.add(function)
            self.hook_function(function)
            stack += [f for f, _ in function.next_functions if f is not None and not hasattr(f, "variable")]

    def hook_function(self, function: Any) -> None:
        """Count the gradients that one function of autograd makes, and what waits for its leaves."""
        leaves = tuple(getattr(f, "variable", None) for f, _ in function.next_functions)
        if self.hooks_once(function):
            function.register_hook(partial(self._see_gradients, leaves))
        for f, _ in function.next_functions:
            # A gradient in another layout than its parameter's is copied there.
            if hasattr(f, "variable") and self.hooks_once(f):
                f.register_hook(partial(self._see_gradient, f.variable))

    def hooks_once(self, function: Any) -> bool:
        """True if a function of autograd is hooked for the first time: it may be come to from several of its users."""
        before = function.metadata.get(Ledger)
        function.metadata[Ledger] = self
        return before is not self

    def _see_gradient(self, leaf: Tensor, made: Any, given: Any) -> None:
        self.sums.taken(leaf)
        if leaf.grad is not None:
            self.see(leaf.grad)

    def _see_gradients(self, leaves: tuple[Tensor | None, ...], made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        refuse_batched(made)
        for g in (*given, *made):
            if isinstance(g, Tensor):
                self.see(g)
        if self.fakes:
            return  # a rehearsal watches autograd's own additions
        for leaf, g in zip(leaves, made, strict=True):
            if leaf is not None and isinstance(g, Tensor):
                self.sums.arrives(leaf, g.nbytes)
                self.peak = max(self.peak, self.held)


def watched(ledger: Ledger | None) -> AbstractContextManager[Any]:
    """A block in which a ledger, if there is one, counts what operators make."""
    return nullcontext() if ledger is None or dispatch_mode() is ledger.watcher else ledger.watcher


@contextmanager
def unseen(ledger: Ledger | None) -> Iterator[None]:
    """A block whose operators nobody can watch, compiled ones: what comes out of it is shown to `Ledger.see`."""
    if ledger is None or dispatch_mode() is not ledger.watcher:
        yield
        return
    ledger.watcher.__exit__(None, None, None)
    try:
        yield
    finally:
        ledger.watcher.__enter__()


def with_gradients(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors, and the gradients that leaves among them have."""
    for t in tensors:
        yield t
        if t.is_leaf and t.grad is not None:
            yield t.grad


@cache
def gives_back(func: Any) -> bool:
    """True if an operator returns memory that it was given, as views and in-place forms do: nothing new is made, and
    what existed before the step (an image that its source slices) is not counted."""
    returns = schema(func).returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


class Watcher(TorchDispatchMode):
    """Shows a ledger every tensor an operator makes."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].device
        out = func(*args, **(kwargs or {}))
        if gives_back(func):
            return out
        see = self.ledger.see
        if isinstance(out, Tensor):
            see(out)
        elif isinstance(out, (tuple, list)):
            for t in out if not any(isinstance(o, (tuple, list, dict)) for o in out) else tree_leaves(out):
                if isinstance(t, Tensor):
                    see(t)
        return out
