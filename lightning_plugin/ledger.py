"""The ledger: bytes that are live on the device during a step.

A ledger watches operators and counts each storage that they allocate, once, until it is freed. Gradients that autograd
makes by itself, between segments, are counted by hooks. Tensors that existed before the step are not counted, except
parameters and their gradients, which the ledger starts with.

[Note: watched] Watching takes longer than many operators do. Tiles of one kind hold the same bytes. So the first tile
of each kind is watched, and of the others only the tensors that outlive their segment are counted (boundaries,
cotangents, results). The first tile may have less memory beside it than later ones, since it allocates the sums that
they add to: a tile is watched again if more is live at its start than when one of its kind was watched before. The
bytes that a tile pass held beyond those live at its start are kept with its findings; an equal pass in a later step is
taken to hold as much, and none of its tiles is watched (unless `Ledger.watch_all`); so is a replay ([Note: replay] in
`program.replay`). If tensors of a tile may be live when the next begins (transfers and reads ahead, ranks that
exchange, scans), all tiles are watched. If an image's pixels decide the number of tiles, or a source the memory of a
read, the first tile of each kind is watched in every step.

[Note: allocator] On CUDA no tile is watched. The ledger counts the tensors that outlive a segment, which may be beside
a later call, and the allocator knows the peak: the most that it gave out since the step began, less the bytes that were
allocated before and are not the step's. The peak therefore includes everything that the process allocates on the device
during the step.

[Note: step] A step may have several calls, images and losses, and its budget is for all of them. Memory that one call
has left on the device (for its backward, results that the user holds, another network's parameters) is *beside* the
next: that call is planned with the rest of the budget, and the peak continues. A step is over when nothing is beside.

[Note: sums] If several functions of one backward pass make gradients of a leaf (an image that two calls read, a weight
that two networks share), autograd adds them up and gives the leaf the sum at the end. It adds between functions, where
no ledger counts. The first sum is a new tensor: autograd does not add in place to the first gradient, which the
ledger's hook has seen. So from the second gradient on there is one tensor more than was counted, until the leaf has it.
Further gradients are added to the sum in place.
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
    after_backward,
    current_pass,
    dispatch_mode,
    refuse_batched,
    schema,
    storage_key,
    tree_leaves,
)


@dataclass(eq=False)
class PendingSums:
    """Sums of gradients that autograd holds for leaves in the current backward pass; see [Note: sums].

    Attributes:
        waiting: Bytes of each leaf's sum, by the leaf's ``id``; 0 after one gradient.
        total: Bytes of all sums.
    """

    waiting: dict[int, int] = field(default_factory=dict)
    total: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all sums. The passes of tiles, which run within this one, leave them."""
        if self.waiting and current_pass() < 0:  # the pass has failed
            self.clear()
        return self.total

    def clear(self) -> None:
        """Forget the sums at the end of the pass, when they are freed."""
        self.waiting.clear()
        self.total = 0

    def add(self, leaf: Tensor, size: int) -> None:
        """Count a gradient of a leaf."""
        if not self.waiting:
            after_backward(self.clear)
        known = self.waiting.get(id(leaf))
        self.waiting[id(leaf)] = 0 if known is None else size
        self.total += 0 if known is None else size - known

    def remove(self, leaf: Tensor) -> None:
        """Forget the sum of a leaf that was given its gradient."""
        self.total -= self.waiting.pop(id(leaf), 0)

    def next_bytes(self, leaves: Iterable[Tensor]) -> int:
        """Return the bytes of the sums that one more gradient of each leaf allocates."""
        return sum(t.nbytes for t in {id(t): t for t in leaves}.values() if self.waiting.get(id(t)) == 0)


@dataclass
class BlockPeak:
    """Most bytes of a block beyond those live at its start; known when the block ends."""

    bytes: int = 0


class CallBytes(NamedTuple):
    """Bytes of one call: of a run that keeps all, and of its plan.

    Args:
        weights: Each tensor that the call uses, with its gradient and optimizer state, by the tensor's ``id``.
        saved: Tensors saved for backward, if all are kept.
        gradients: Gradients of its images.
        workspaces: Memory that its plan reserves for the device's libraries.
        peak: Peak of its plan.
        held: What its plan holds for backward.
        weight_gradients: Gradients of the tensors that it uses.
    """

    weights: Mapping[int, int]
    saved: int
    gradients: int
    workspaces: int = 0
    peak: int = 0
    held: int = 0
    weight_gradients: int = 0


def peak_of_calls(peak: int, others: Iterable[int], weight_gradients: int) -> int:
    """Return the peak of calls that wait for one backward.

    Args:
        peak: The peak of one call alone.
        others: What each of the other calls holds while that one is pulled back.
        weight_gradients: The gradients of the weights. Beside those that a call makes there are the gradients of the
            calls pulled back before, and the sum of both: see [Note: sums].
    """
    held = list(others)
    return peak + sum(held) + (2 * weight_gradients if held else 0)


class Ledger:
    """Bytes that are live now, and their peak.

    Attributes:
        live: Bytes live now.
        peak: Most bytes that were live since the step began.
        device: The device that is counted.
        fakes: Count storages of fake tensors, in a rehearsal.
        limit: The budget, if there is one.
        watcher: The dispatch mode that shows operators' results to the ledger.
        heap: Memory of the process, if it is trimmed.
        pending_sums: Sums of gradients that wait for their leaves.
        calls: The calls whose graph is alive, by a token that the graph holds.
        watch_all: Watch tile passes in every step, also those whose peak is known.
    """

    watch_all: ClassVar[bool] = False

    def __init__(self, device: torch.device | None = None, fakes: bool = False) -> None:
        self.live = self.peak = 0
        self._pass_peak = 0
        self.device = device or torch.device("cpu")
        self.fakes = fakes
        self.limit: int | None = None
        self.watcher = Watcher(self)
        self.heap: Heap | None = None
        self._refs: dict[int, tuple[Any, int]] = {}
        self._other_bytes = 0
        self.pending_sums = PendingSums()
        self.calls: WeakKeyDictionary[object, CallBytes] = WeakKeyDictionary()

    def begin(self) -> None:
        """Begin a step, whose peak counts from the bytes live now."""
        self.peak = self.live
        self._pass_peak = 0
        if self.uses_allocator:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._other_bytes = torch.cuda.memory_allocated(self.device) - self.live

    def count_existing(self, tensor: Tensor) -> None:
        """Count a tensor that existed before the step, and its gradient."""
        before = self.live
        for t in with_gradients([tensor]):
            self.count(t)
        self._other_bytes -= self.live - before

    def bytes_to_keep_all(self, *more: CallBytes) -> int:
        """Return the bytes that suffice to keep all calls that wait for backward and ``more``, untiled. No plans of
        these calls take more."""
        calls = [*self.calls.values(), *more]
        weights = {key: size for call in calls for key, size in call.weights.items()}
        # The gradients of a call's maps take at most as much again as its saved tensors.
        maps = sum(call.saved + call.gradients for call in calls) + max(call.saved for call in calls)
        return sum(weights.values()) + maps + max(call.workspaces for call in calls)

    def bytes_to_plan_together(self) -> int:
        """Return the bytes that suffice for plans of all calls that wait for backward, if their number is known before
        the first. Of two calls, one may have been pulled back and be forgotten."""
        first, *others = sorted(self.calls.values(), key=lambda call: -call.peak)
        held = (max(call.held, call.gradients) for call in others or [first])
        return peak_of_calls(first.peak, held, max(call.weight_gradients for call in self.calls.values()))

    def bytes_beside(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes live beside some tensors and their gradients: see [Note: step]."""
        storages = {storage_key(t) for t in with_gradients(tensors)}
        return self.live - sum(self._refs[key][1] for key in storages if key in self._refs)

    @property
    def uses_allocator(self) -> bool:
        """True if the peak is that of the device's allocator: see [Note: allocator]."""
        return self.device.type == "cuda" and not self.fakes

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already; a sparse gradient has none."""
        if tensor.layout is not torch.strided:
            return
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._refs or (storage.device.type == "meta") != self.fakes:
            return
        if tensor.device.type != self.device.type:
            return  # a tensor on the host beside a device
        storage_bytes = storage.nbytes()
        if not storage_bytes:
            return
        self._refs[key] = weakref.ref(storage, partial(self._forget, key)), storage_bytes
        self.live += storage_bytes
        if self.heap is not None and self.heap.is_due:
            self.trim_memory()
        self.peak = max(self.peak, self.held)

    def trim_memory(self) -> None:
        """Return freed memory of the process to the system: see [Note: heap] in `memory`."""
        if self.heap is not None:
            self.heap.trim(self.live)

    @contextmanager
    def measure(self) -> Iterator[BlockPeak]:
        """Measure the most bytes that a block holds beyond those live at its start."""
        before, peak = self.held, self.peak
        found, self.peak = BlockPeak(), self.held
        try:
            yield found
        finally:
            found.bytes = self.peak - before
            self.peak = max(peak, self.peak)

    def add_unwatched(self, size: int) -> None:
        """Raise the peak to ``size`` bytes beyond those held now, for a tile pass that is not watched."""
        self.peak = max(self.peak, self.held + size)

    @property
    def held(self) -> int:
        """Bytes live now, with sums that wait for their leaves: see [Note: sums]."""
        return self.live + self.pending_sums.bytes

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage, which existed before the step."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, partial(self._forget, key)), 0

    def discount(self, tensor: Tensor) -> None:
        """Stop counting a tensor's storage, which leaves the device."""
        self._forget(storage_key(tensor))

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were live since the step began."""
        if self.uses_allocator:
            return max(self.peak, torch.cuda.max_memory_allocated(self.device) - self._other_bytes)
        return self.peak

    def end_pass(self) -> None:
        """Note the peak at the end of a forward or backward pass. What is allocated from then on until the next step
        (by an average of weights, a validation, another network) is not the step's."""
        self._pass_peak = self.peak_bytes

    @property
    def excess(self) -> int:
        """Bytes by which the passes of the step exceeded its budget: workspaces of the device's libraries, whose sizes
        are not known before."""
        return max(0, self._pass_peak - self.limit) if self.uses_allocator and self.limit is not None else 0

    def _forget(self, key: int, _: Any = None) -> None:
        found = self._refs.pop(key, None)
        if found is not None:
            self.live -= found[1]
            if self.heap is not None:
                self.heap.freed += found[1]

    def hook_gradients(self, tensor: Tensor, until: Iterable[Any] = ()) -> None:
        """Count the gradients that autograd makes from a tensor's function back to the functions ``until``, exclusive,
        which made the operator's inputs."""
        if tensor.grad_fn is None:
            return
        stack, seen = [tensor.grad_fn], set(until)
        while stack:
            function = stack.pop()
            if function in seen:
                continue
            seen.add(function)
            if self.hook_function(function):
                stack += [f for f, _ in function.next_functions if f is not None and not hasattr(f, "variable")]

    def hook_function(self, function: Any) -> bool:
        """Count the gradients that one function of autograd makes, and the pending sums of its leaves; True if they
        were not counted yet."""
        leaves = tuple(getattr(f, "variable", None) for f, _ in function.next_functions)
        is_new = self.mark_hooked(function)
        if is_new:
            function.register_hook(partial(self._count_gradients, leaves))
        for f, _ in function.next_functions:
            # Autograd copies a gradient whose layout differs from its parameter's.
            if hasattr(f, "variable") and self.mark_hooked(f):
                f.register_hook(partial(self._count_leaf_gradient, f.variable))
        return is_new

    def mark_hooked(self, function: Any) -> bool:
        """Mark a function of autograd as hooked; True if it was not: several of its users may lead to it."""
        before = function.metadata.get(Ledger)
        function.metadata[Ledger] = self
        return before is not self

    def _count_leaf_gradient(self, leaf: Tensor, made: Any, given: Any) -> None:
        self.pending_sums.remove(leaf)
        if leaf.grad is not None:
            self.count(leaf.grad)

    def _count_gradients(
        self, leaves: tuple[Tensor | None, ...], made: tuple[Any, ...], given: tuple[Any, ...]
    ) -> None:
        refuse_batched(made)
        for g in (*given, *made):
            if isinstance(g, Tensor):
                self.count(g)
        if self.fakes:
            return  # a rehearsal runs autograd under the watcher, which sees its additions
        for leaf, g in zip(leaves, made, strict=True):
            if leaf is not None and isinstance(g, Tensor) and g.layout is torch.strided:
                self.pending_sums.add(leaf, g.nbytes)
                self.peak = max(self.peak, self.held)


def watched(ledger: Ledger | None) -> AbstractContextManager[Any]:
    """Return a context in which a ledger, if there is one, counts the results of operators."""
    return nullcontext() if ledger is None or dispatch_mode() is ledger.watcher else ledger.watcher


@contextmanager
def unwatched(ledger: Ledger | None) -> Iterator[None]:
    """Suspend the watcher for compiled operators, which it cannot see; pass their results to `Ledger.count`."""
    if ledger is None or dispatch_mode() is not ledger.watcher:
        yield
        return
    ledger.watcher.__exit__(None, None, None)
    try:
        yield
    finally:
        ledger.watcher.__enter__()


def with_gradients(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Iterate over tensors and the gradients of leaves among them."""
    for t in tensors:
        yield t
        if t.is_leaf and t.grad is not None and t.grad.layout is torch.strided:
            yield t.grad


@cache
def returns_inputs(func: Any) -> bool:
    """True if an operator returns memory of its inputs, as views and in-place forms do. Such results are not counted:
    an image that its source slices existed before the step."""
    returns = schema(func).returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


class Watcher(TorchDispatchMode):
    """Dispatch mode that counts the results of all operators in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].device
        out = func(*args, **(kwargs or {}))
        if returns_inputs(func):
            return out
        count = self.ledger.count
        if isinstance(out, Tensor):
            count(out)
        elif isinstance(out, (tuple, list)):
            for t in out if not any(isinstance(o, (tuple, list, dict)) for o in out) else tree_leaves(out):
                if isinstance(t, Tensor):
                    count(t)
        return out
