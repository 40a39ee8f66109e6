"""What a step holds, by the books of PyTorch's own CPU allocator: it shares no code with the engine's ledger.

The profiler notes each allocation and each release, with the operator in which it happened.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

#: Operators that hand on one of the results of another operator and let the other go: that one was there.
OF_OTHERS = {f"aten::max_pool{n}d" for n in (1, 2, 3)}


@dataclass(frozen=True)
class Account:
    """Bytes: ``held`` at most between operators; ``peak`` at most at all, with what single operators' kernels took and
    gave back before they returned; ``left`` at the end."""

    held: int
    peak: int
    left: int


@dataclass(frozen=True)
class Event:
    """Memory that comes (or goes: ``size`` is negative) at an address; within which call of an operator, if any."""

    when: int
    address: int
    size: int
    operator: int | None


def account(step: Callable[[], object], net: nn.Module) -> Account:
    """The books of a step, with what a network holds before it: parameters, buffers and the gradients it has.

    The step runs twice: planning holds no data, but its rehearsals would fill the profiler's memory with events. It is
    over when the second run begins, with as many gradients as the first.
    """
    fresh = [p for p in net.parameters() if p.grad is None]
    step()
    for p in fresh:
        p.grad = None
    gc.collect()  # what only waits for it, and is let go within the second run, would be taken off its books
    before = sum(t.untyped_storage().nbytes() for t in standing(net))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto: Any = profiler.profiler
    roots = kineto.kineto_results.experimental_event_tree()
    events = sorted((e for root in roots for e in events_of(root, None)), key=lambda e: e.when)
    own = own_of_operators(events)
    held = [e.size for i, e in enumerate(events) if i not in own]
    everything = [e.size for e in events]
    sums = (max(accumulate(held), default=0), max(accumulate(everything), default=0), sum(everything))
    return Account(*(before + n for n in sums))


def standing(net: nn.Module) -> list[Tensor]:
    """A network's tensors and their gradients, without those that were moved to a file."""
    tensors = [*net.parameters(), *net.buffers()]
    return [t for t in (*tensors, *(t.grad for t in tensors)) if t is not None and not in_a_file(t)]


def in_a_file(tensor: Tensor) -> bool:
    """True if a tensor lies in a part of a file that is mapped into memory, as the system's own list says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return inode != "0"
    return False


def events_of(node: Any, operator: int | None) -> Iterator[Event]:
    """The memory events under a node of the profiler's tree. An operator's own calls of operators are part of it."""
    stack = [(node, operator)]
    while stack:
        here, inside = stack.pop()
        if here.tag.name == "Allocation":
            about = here.typed[1]
            yield Event(here.start_time_ns, about.ptr, about.alloc_size, inside)
        elif not here.name.startswith("aten::"):
            inside = None  # Python, or autograd, which calls operators in turn
        elif inside is None and here.name not in OF_OTHERS:
            inside = here.start_time_ns
        stack += [(child, inside) for child in here.children]


def own_of_operators(events: list[Event]) -> set[int]:
    """The places of what came and went within one call of one operator."""
    found: set[int] = set()
    came: dict[int, int] = {}
    for i, event in enumerate(events):
        if event.size > 0:
            came[event.address] = i
            continue
        begin = came.pop(event.address, None)
        if begin is not None and event.operator is not None and events[begin].operator == event.operator:
            found |= {begin, i}
    return found
