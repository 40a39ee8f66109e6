"""The few kinds of operator that the executor can run: a rule makes one of each operator call.

The executor knows nothing about convolutions or losses. It knows these kinds:

- `TileOp` maps tiles to a tile. It says which box of each input map an output box needs, and computes that output.
  Local, window, resample, layout and broadcast operators are of this kind.
- `ReduceOp` takes tiles that partition its input map and makes vectors out of them.
- `VectorOp` makes vectors from vectors: ordinary PyTorch with ordinary autograd.
- `Barrier` needs its input maps whole.
- `Source`, `Captured` and `Spread` bring tensors into the graph.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout

#: Computes a tile from tiles and vectors.
Kernel = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which reductions and sums of gradients are computed: float32 for halves, the type itself
    otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Op(ABC):
    """Anything that a node can do.

    ``uniform``: on a tile of one value, the result depends on that value and on how the tile lies to the borders, and
    on nothing else; see [Note: identical tiles] in `execute.tile_pass`.
    """

    kind: ClassVar[str]
    uniform: ClassVar[bool] = False

    @property
    def approximation(self) -> str:
        """The words of a plan for an operator that only approximates the user's, as an option asks."""
        return ""

    @property
    def drawn(self) -> bool:
        """True if it was drawn for one step: no later step has the same operator."""
        return False


class TileOp(Op):
    """Tiles in, a tile out."""

    @abstractmethod
    def need(self, box: Box) -> tuple[Box, ...]:
        """For each input map, the box inside that map which the output box depends on."""

    @abstractmethod
    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """The output on ``box`` from input tiles that hold exactly ``need(box)``."""

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """The state that the output on an interval of an axis depends on besides the tiles and their sizes: where it
        lies, unless the operator says otherwise. See [Note: tapes] in `program.tape`."""
        return lo, hi

    def pads(self, box: Box) -> Sequence[int]:
        """The padding of a tile to compute a box, where anything may be."""
        return ()

    def pads_by_hand(self, box: Box) -> bool:
        """True if computing a box makes a padded copy of its input."""
        return False

    def joins(self, box: Box) -> bool:
        """True if the result on a box is put together of parts, where on others it may be a view of its input."""
        return False

    def joints(self, axis: int) -> Sequence[int]:
        """Positions on an axis of the result where parts meet that are computed one by one."""
        return ()

    @property
    def in_pieces(self) -> tuple[int, ...]:
        """The places of the input maps for which `apply` takes `Pieces`, where all of them are."""
        return ()

    @property
    def views(self) -> bool:
        """True if the result is made as a view of a fresh one: autograd pays with copies for what is written into it in
        place."""
        return False

    def bound(self, box: Box) -> Kernel:
        """`apply` on a box, or on any other that has the same sizes and marks."""
        return partial(self.apply, box)

    def unread(self, box: Box) -> Kernel | None:
        """A function that has the gradients of `apply` on such a box and makes no result, for backward where nobody
        reads it; None where the operator has nothing of the kind. See [Note: unread] in `rules.unread`."""
        return None

    def whole(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor | None:
        """All of the output from whole maps as plain PyTorch computes it, or None where `apply` does as well."""
        return None


class AxisMap(Protocol):
    """The position of an operator's result along one axis over the map that it reads."""

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        """The positions inside the map that results ``[lo, hi)`` read: one at least."""

    def mark(self, lo: int, hi: int) -> Hashable:
        """The state that results ``[lo, hi)`` depend on besides their input: see `TileOp.mark`."""


@dataclass(frozen=True)
class Along(TileOp):
    """An operator that goes axis by axis: ``maps[i]`` is that of ``axes[i]``, and other axes stay as they are."""

    maps: tuple[AxisMap, ...]
    axes: tuple[int, ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        lo, hi = list(box.lo), list(box.hi)
        for m, a in zip(self.maps, self.axes, strict=True):
            lo[a], hi[a] = m.need(lo[a], hi[a])
        return (Box(tuple(lo), tuple(hi)),)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return tuple(m.mark(lo, hi) for m, a in zip(self.maps, self.axes, strict=True) if a == axis)

    def intervals(self, box: Box) -> list[tuple[int, int]]:
        """The interval of a box for each map."""
        return [(box.lo[a], box.hi[a]) for a in self.axes]


@dataclass(frozen=True, eq=False)
class Pieces:
    """In place of a tile: one that is too large to be held, read piece by piece; see [Note: pieces] in `rules.pieces`.

    ``ends`` are the positions, along the dimension that is in pieces, between which they lie; ``read`` reads one by its
    number, ``give`` takes its gradient, where one is wanted: then ``token``, a number without data, requires grad.
    """

    ends: tuple[int, ...]
    read: Callable[[int], Tensor]
    give: Callable[[int, Tensor], None] | None
    token: Tensor

    @property
    def intervals(self) -> Iterator[tuple[int, int]]:
        return itertools.pairwise(self.ends)


@dataclass(frozen=True)
class Reduction:
    """The accumulator of a reduce operator: tensors in a wide type, merged over tiles in tile order."""

    parts: tuple[Tensor, ...]

    def to(self, device: torch.device | str) -> Reduction:
        return replace(self, parts=tuple(t.to(device) for t in self.parts))


class ReduceOp(Op):
    """Tiles in, vectors out.

    Forward merges in a numerically stable form (`partial`, `merge`, `finish`). Backward uses `pull`: plain sums over
    the tile's own positions, with the final vectors as constants, whose derivative, summed over tiles, is that of the
    reduction.
    """

    kind = "reduce"

    def need(self, box: Box) -> tuple[Box, ...]:
        """The boxes of all input maps for an owned box of the first."""
        return (box,)

    @abstractmethod
    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction: ...

    @abstractmethod
    def merge(self, left: Reduction, right: Reduction) -> Reduction: ...

    def lands(self, box: Box) -> Hashable:
        """The place of a tile's share in the results; the same for all tiles unless the operator says otherwise."""
        return None

    def repeat(self, part: Reduction, times: int) -> Reduction:
        """The share of so many tiles that are all alike: one's, merged with itself by doubling."""
        total: Reduction | None = None
        while True:
            if times % 2:
                total = part if total is None else self.merge(total, part)
            times //= 2
            if not times:
                assert total is not None
                return total
            part = self.merge(part, part)

    @abstractmethod
    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]: ...

    @property
    def seeks(self) -> bool:
        """True if backward may look for results among its tiles by their very bits."""
        return False

    def uncertain(self, outputs: Sequence[Tensor], shared: bool) -> bool:
        """True if `pull` needs the results as the tiles of backward come to them, and not as forward's did; ``shared``:
        some of those tiles may stand for others."""
        return False

    @abstractmethod
    def pull(
        self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """One differentiable tensor for each output (None for one without gradient)."""

    def pulled(
        self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """`pull`, with grad, and with a gradient of each tile that lies in memory.

        The gradient of a sum is one number, seen everywhere. Kernels add up such a view with fewer digits than a map in
        memory, which is what PyTorch's own mean makes of it.
        """
        for tile in tiles:
            if tile.requires_grad:
                tile.register_hook(in_memory)
        with torch.enable_grad():
            return self.pull(box, tiles, vectors, outputs)


def in_memory(gradient: Tensor) -> Tensor:
    return gradient.contiguous() if 0 in gradient.stride() else gradient


@dataclass(frozen=True)
class VectorOp(Op):
    """A call on vectors. ``rebind`` marks calls that write into their first argument: it is copied first."""

    kind: ClassVar[str] = "vector"
    call: Call
    rebind: bool = False

    def run(self, tensors: Sequence[Tensor]) -> Any:
        if self.rebind:
            tensors = [tensors[0].clone(), *tensors[1:]]
        result = self.call(tensors)
        return tensors[0] if self.rebind else result


@dataclass(frozen=True)
class Barrier(Op):
    """A call that needs its maps whole; ``reason`` is what the plan and messages say."""

    kind: ClassVar[str] = "barrier"
    call: Call
    reason: str
    rebind: bool = False

    def run(self, tensors: Sequence[Tensor]) -> Any:
        return VectorOp(self.call, self.rebind).run(tensors)


@dataclass(frozen=True)
class Source(Op):
    """An image read box by box: out of a tensor on the device ("here"), out of one elsewhere in memory ("memory"), or
    by a source of its own ("elsewhere"), that may want to hear of boxes before they are read, and may read a box of all
    images ``together``. So many of its last axes count images."""

    kind: ClassVar[str] = "source"
    lies: Literal["here", "memory", "elsewhere"]
    prefetches: bool = False
    instances: int = 0
    together: bool = False


@dataclass(frozen=True)
class Captured(Op):
    """A real tensor that the recorded code used: a parameter, a buffer, a target."""

    kind: ClassVar[str] = "captured"


@dataclass(frozen=True)
class Spread(Op):
    """A vector with spatial dimensions that meets a map: each tile takes its slice of it."""

    kind: ClassVar[str] = "broadcast"
    layout: Layout


@dataclass(frozen=True)
class Gather(Op):
    """A map made whole: the tensor a barrier, or the user, asked for."""

    kind: ClassVar[str] = "gather"


@dataclass(frozen=True)
class Autocast:
    """The autocast state under which a call was recorded."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def now(device: torch.device) -> Autocast:
        kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    @property
    def idle(self) -> bool:
        """True if it is what holds anyway."""
        return not self.enabled and not torch.is_autocast_enabled(self.device_type)

    def replay(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class Slot:
    """The place of the i-th tensor in the arguments of a recorded call."""

    index: int


@dataclass(frozen=True)
class Call:
    """A function with its arguments; tensors are `Slot`s to be filled at each run."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    autocast: Autocast | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if self.autocast is None or self.autocast.idle:
            return self.filled(tensors)
        with self.autocast.replay():
            return self.filled(tensors)

    @cached_property
    def filled(self) -> Callable[[Sequence[Tensor]], Any]:
        """The function as one of its tensors alone. Where each is an argument by itself, nothing is looked through."""
        func, args, kwargs = self.func, self.args, dict(self.kwargs)
        slots = [(i, a.index) for i, a in enumerate(args) if isinstance(a, Slot)]
        names = [(name, a.index) for name, a in kwargs.items() if isinstance(a, Slot)]
        if any(not isinstance(a, Slot) and has_slots(a) for a in (*args, *kwargs.values())):
            return lambda tensors: func(*fill(args, tensors), **{k: fill(v, tensors) for k, v in kwargs.items()})

        def run(tensors: Sequence[Tensor]) -> Any:
            here = list(args)
            for i, index in slots:
                here[i] = tensors[index]
            if names:
                return func(*here, **{**kwargs, **{name: tensors[index] for name, index in names}})
            return func(*here, **kwargs)

        return run

    @cached_property
    def on_tiles(self) -> Kernel:
        """The call on tiles and vectors, which come first among its arguments far more often than not."""
        func, autocast, kwargs = self.func, self.autocast, dict(self.kwargs)
        count = next((i for i, a in enumerate(self.args) if not isinstance(a, Slot)), len(self.args))
        rest = self.args[count:]
        if [a.index for a in self.args[:count]] != list(range(count)) or has_slots((*rest, kwargs)):
            return lambda tiles, vectors: self([*tiles, *vectors])
        if autocast is None:
            return lambda tiles, vectors: func(*tiles, *vectors, *rest, **kwargs)

        def run(tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
            if autocast.idle:
                return func(*tiles, *vectors, *rest, **kwargs)
            with autocast.replay():
                return func(*tiles, *vectors, *rest, **kwargs)

        return run


def has_slots(template: Any) -> bool:
    """True if a template has slots to be filled."""
    if isinstance(template, dict):
        template = tuple(template.values())
    return isinstance(template, Slot) or (isinstance(template, (tuple, list)) and any(map(has_slots, template)))


def fill(template: Any, tensors: Sequence[Tensor]) -> Any:
    """A template with its slots filled."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, tuple):
        items = [fill(t, tensors) for t in template]
        return type(template)(*items) if hasattr(template, "_fields") else tuple(items)
    if isinstance(template, list):
        return [fill(t, tensors) for t in template]
    if isinstance(template, dict):
        return {k: fill(v, tensors) for k, v in template.items()}
    return template
