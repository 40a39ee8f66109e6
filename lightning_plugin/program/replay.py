"""Replays: a pass over the tiles of a segment as one Python function of its ATen calls.

[Note: replay] Tiles of a few thousand positions take less time than what leads to their kernels: finding boxes, cutting
parts out of maps, autograd's bookkeeping. In a step whose calls were seen before ([Seen calls] in docs/design.md) all
of that comes out as it did before. So the third time that a segment runs, a dispatch mode below autograd writes down
the ATen calls of its pass, tile after tile, and from the fourth time on a function with one line for each call runs in
place of the pass, without autograd. The calls are the same in the same order, so results are equal to the bit. A tensor
is freed after its last use, which autograd does at the earliest: a replay holds no more than the pass held.

A tensor is known by its place: its storage, and offset, shape, strides and type within it. Autograd hands back what it
saved as new objects, but in the same place. All that a pass reads is given to the replay, in one order: nothing that
may change between two steps is part of the function. Of tensors that are made from numbers of Python, a copy is kept.

What a pass decides by numbers must not be written down, since another step may decide otherwise. Calls that return
numbers or results whose shape depends on values, random calls, and tensors that were neither given nor made by a call
are an *obstacle*: then there is no replay, and the pass runs tile by tile. The one decision that is made without such a
call, to leave out tiles without a cotangent (`Backward.zero_tiles`), ends a recording if there are such tiles; a replay
evaluates all, whose gradients are then zeros.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_plugin.ledger import BlockPeak, Ledger, watched
from lightning_plugin.private import (
    OPERATORS,
    TorchDispatchMode,
    below_autograd,
    direct,
    dispatch_mode,
    dispatch_modes,
    schema,
    settings,
    storage_key,
    tree_leaves,
)

#: Most calls of a replay. Larger passes take their time for kernels.
MAX_CALLS = 10_000
#: Most replays of a segment: for its directions, parts, and patterns of gradients.
MAX_REPLAYS = 8
#: The run of a pass in which its calls are written down for the first time, and most times that this is tried.
FIRST_RECORDED, MAX_RECORDINGS = 3, 3

#: Offset, shape, strides and type of a tensor in its storage, and if it is read as a conjugate or a negative.
Layout = tuple[Hashable, ...]


def layout_of(t: Tensor) -> Layout:
    """Return what decides, besides shapes, which ATen calls a pass on a tensor makes."""
    return t.stride(), t.dtype, t.is_conj(), t.is_neg()


class Slot(NamedTuple):
    """A tensor of a replay: one that is given, or the result of a call; ``number`` counts them."""

    number: int


class Constant(NamedTuple):
    """A tensor that was made from numbers of Python."""

    tensor: Tensor


class Call(NamedTuple):
    """An ATen call.

    Attributes:
        function: The operator.
        args: Its arguments, with slots for tensors.
        kwargs: Its keyword arguments, likewise.
        made: The slots of its results; None for those that are no new tensors.
        several: True if it returns a tuple or a list.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Slot | None, ...]
    several: bool


class Replay:
    """The calls of a pass as a function.

    Attributes:
        function: Takes the tensors that are given, and returns the results.
        bytes: Bytes that the pass held at its peak beyond those at its start.
    """

    def __init__(self, calls: Sequence[Call], given: int, results: Sequence[Slot | None], peak_bytes: int) -> None:
        self.function = compile_calls(calls, given, results)
        self.bytes = peak_bytes

    def __call__(self, given: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        with below_autograd():
            return self.function(*given)


class Recorder(TorchDispatchMode):
    """Dispatch mode that writes down ATen calls.

    Attributes:
        calls: The calls.
        obstacle: The first reason why they cannot be replayed; None if there is none.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.obstacle: str | None = None
        self._slots: dict[int, dict[Layout, Slot | Constant]] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0
        self._given = set(map(storage_key, given))
        for t in given:
            if self.find(t) is not None:
                self.obstacle = "two inputs are one tensor"
            self.add(t)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if self.obstacle is None:
            self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write a call down, unless its result is a view in the place of its argument, or depends on no tensor."""
        writes = schema(func).is_mutable
        if isinstance(result, Tensor):
            if (not writes and self.find(result) is not None) or func is torch.ops.aten.detach.default:
                return  # no call reads the tokens that are detached
        elif not any(isinstance(t, Tensor) for t in tree_leaves((args, kwargs))):
            return
        if len(self.calls) == MAX_CALLS or not is_repeatable(func, args, kwargs):
            self.obstacle = str(func)
            return
        if func in FROM_NUMBERS:
            func, args = torch.ops.aten.clone.default, (Constant(args[0].clone()),)
        if func is torch.ops.aten.as_strided.default:
            args = args[:3] if args[3:] in ((), (None,), (args[0].storage_offset(),)) else args
            if len(args) > 3 and storage_key(args[0]) in self._given:
                self.obstacle = "as_strided with a place in the storage of an input"
        args, kwargs = self.with_slots(args), self.with_slots(kwargs)
        if writes and isinstance(args[0], Constant):
            self.obstacle = f"{func} writes to a constant"
        several = isinstance(result, (tuple, list))
        made = tuple([self.made(t, writes) for t in (result if several else (result,))])
        if self.obstacle is None:
            self.calls.append(Call(func, args, kwargs, made, several))

    def add_constants(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that were made from numbers of Python."""
        for t in tensors:
            self._slots.setdefault(storage_key(t), {})[place_of(t)] = Constant(t)  # which keeps the storage alive

    def made(self, result: Any, writes: bool) -> Slot | None:
        """Return the slot of a call's result; None for an argument that was written to."""
        if isinstance(result, Tensor):
            return None if writes and self.find(result) is not None else self.add(result)
        if result is not None:
            self.obstacle = "a call returns a number"
        return None

    def with_slots(self, tree: Any) -> Any:
        """Return arguments with slots in place of tensors."""
        kind = type(tree)
        if kind in NUMBERS:
            return tree
        if isinstance(tree, Tensor):
            slot = self.find(tree)
            if slot is None:
                self.obstacle = f"a tensor of shape {tuple(tree.shape)} was neither given nor made"
            return slot
        if kind is tuple or kind is list:
            return [self.with_slots(t) for t in tree]
        if kind is dict:
            return {key: self.with_slots(t) for key, t in tree.items()}
        if kind is torch.Generator:
            self.obstacle = "a call has a generator"
        return tree

    def find(self, t: Tensor) -> Slot | Constant | None:
        """Return the slot of a tensor; None for one that was neither given nor made, or is no ordinary tensor."""
        return self._slots.get(storage_key(t), {}).get(place_of(t)) if t.layout is torch.strided else None

    def add(self, t: Tensor) -> Slot:
        """Give a tensor a slot."""
        if type(t) not in (Tensor, torch.nn.Parameter) or t.layout is not torch.strided:
            self.obstacle = f"a tensor is a {type(t).__name__}"
            return Slot(-1)
        key = storage_key(t)
        if key not in self._storages:
            self._storages[key] = weakref.ref(t.untyped_storage(), partial(self._forget, key))
        slot, self._count = Slot(self._count), self._count + 1
        self._slots.setdefault(key, {})[place_of(t)] = slot
        return slot

    def _forget(self, key: int, _: object) -> None:
        """Forget a storage that was freed: another one may get its address."""
        self._storages.pop(key, None)
        self._slots.pop(key, None)

    def finish(self, given: int, results: Sequence[Tensor | None], peak_bytes: int) -> Replay | None:
        """Return the replay of the calls; None if there is an obstacle."""
        found = [None if t is None else self.find(t) for t in results]
        slots = [s if isinstance(s, Slot) and s.number >= given else None for s in found]
        made = [s for s in slots if s is not None]
        if len({*made}) < sum(t is not None for t in results):
            self.obstacle = self.obstacle or "a result is an input, a constant, or another result"
        return None if self.obstacle is not None else Replay(self.calls, given, slots, peak_bytes)


class Replays:
    """The replays of one segment's passes, by what decides their calls.

    Attributes:
        known: For each key the replay, or how often the pass has run without one.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Replay | int] = {}

    def run(
        self,
        key: Hashable,
        given: Sequence[Tensor],
        tile_by_tile: Callable[[], Sequence[Tensor | None]],
        ledger: Ledger | None,
    ) -> tuple[Sequence[Tensor | None], bool]:
        """Run a pass; after `FIRST_RECORDED` times as a replay, if its calls can be written down.

        Args:
            key: What decides, besides the layouts of ``given``, which calls the pass makes.
            given: All tensors that it reads or writes.
            tile_by_tile: Runs the pass without a replay.
            ledger: Counts what the pass allocates.

        Returns:
            The results, and True if a replay made them.
        """
        key = key, *map(layout_of, given), *settings()
        known = self.known.get(key)
        if isinstance(known, Replay):
            if ledger is not None and not ledger.watch_all:
                ledger.add_unwatched(known.bytes)
            with watched(ledger if Ledger.watch_all else None):
                return known(given), True
        if known is None and len(self.known) == MAX_REPLAYS:
            del self.known[next(iter(self.known))]
        self.known[key] = runs = 1 + (known or 0)
        if not FIRST_RECORDED <= runs < FIRST_RECORDED + MAX_RECORDINGS or dispatch_mode() is not None:
            return tile_by_tile(), False
        recorder = Recorder(given)
        measured = nullcontext(BlockPeak()) if ledger is None else ledger.measure()
        with recorder, measured as peak, watched(ledger):
            results = tile_by_tile()
        replay = recorder.finish(len(given), results, peak.bytes)
        if replay is not None:
            self.known[key] = replay
        return results, False


def prevent_replay(reason: str) -> None:
    """End the recording that is going on, if there is one: a decision by numbers was made."""
    for mode in dispatch_modes():
        if isinstance(mode, Recorder):
            mode.obstacle = reason


#: Tags of operators that may do something else, or return another shape, when they are called again.
DOUBTFUL = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.nondeterministic_seeded,
        torch.Tag.inplace_view,
    }
)
#: Types of arguments that are written as they are.
NUMBERS = frozenset({int, float, bool, str, type(None)})
#: Calls by which `torch.tensor` makes a tensor of numbers.
FROM_NUMBERS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


def is_repeatable(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for a call that does the same for other values: it draws no random numbers, and reads none to decide."""
    tags = doubtful_tags(func)
    if not tags:
        return True
    if tags == {torch.Tag.dynamic_output_shape} and func is torch.ops.aten.index.Tensor:  # by masks, not by positions
        return all(t is None or t.dtype in (torch.int64, torch.int32) for t in args[1])
    if tags == {torch.Tag.nondeterministic_seeded}:  # attention without dropout draws nothing
        names = {a.name: a.default_value for a in schema(func).arguments}
        given = dict(zip(names, args, strict=False))
        return {**names, **given, **kwargs}.get("dropout_p") == 0.0
    return False


@cache
def doubtful_tags(func: Any) -> frozenset[torch.Tag]:
    """Return the tags of an operator that may do something else when it is called again; all for other functions."""
    return DOUBTFUL.intersection(func.tags) if isinstance(func, OPERATORS[0]) else DOUBTFUL


def place_of(t: Tensor) -> Layout:
    """Return the place of a tensor in its storage."""
    return t.storage_offset(), t.shape, *layout_of(t)


def compile_calls(
    calls: Sequence[Call], given: int, results: Sequence[Slot | None]
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Compile a function that makes the calls whose results are used, and deletes each tensor after its last use."""
    names: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
    known: dict[int, str] = {}

    def constant(value: Any) -> str:
        if id(value) not in known:
            known[id(value)] = f"c{len(known)}"
            names[known[id(value)]] = value
        return known[id(value)]

    def written(tree: Any, used: set[int]) -> str:
        if isinstance(tree, Slot):
            used.add(tree.number)
            return f"t{tree.number}"
        if isinstance(tree, Constant):
            return constant(tree.tensor)
        if type(tree) is list:
            return f"[{', '.join([written(t, used) for t in tree])}]"
        return repr(tree) if type(tree) in NUMBERS else constant(tree)

    live = {slot.number for slot in results if slot is not None}
    lines = [f"    return ({''.join([f't{slot.number}, ' if slot is not None else 'None, ' for slot in results])})"]
    for call in reversed(calls):
        made = {slot.number for slot in call.made if slot is not None}
        if made and not (made & live or schema(call.function).is_mutable):
            continue  # one without results checks something
        used: set[int] = set()
        args = [written(a, used) for a in call.args]
        args += [f"{key}={written(a, used)}" for key, a in call.kwargs.items()]
        ends = [f"t{i}" for i in sorted(used - live - made)]
        if ends:
            lines.append(f"    del {', '.join(ends)}")
        kept = [f"t{slot.number}" if slot is not None and slot.number in live else "_" for slot in call.made]
        target = ""
        if made & live:
            target = f"{', '.join(kept)}{',' if call.several and len(kept) == 1 else ''} = "
            if "_" in kept:
                lines.append("    del _")
        lines.append(f"    {target}{constant(direct(call.function))}({', '.join(args)})")
        live = (live - made) | used
    arguments = ", ".join([f"t{i}" for i in range(given)])
    body = "\n".join([f"def replay({arguments}):", *reversed(lines)])
    exec(compile(body, "<replay>", "exec"), names)  # noqa: S102 (names of slots and constants, numbers and `repr`)
    return names["replay"]  # type: ignore[no-any-return]
