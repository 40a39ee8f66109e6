"""Kinds of operators that the executor runs. A rule translates each call of a PyTorch operator into one of them.

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

#: Function that computes a tile from input tiles and vectors.
Kernel = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of reductions and of sums of gradients: that of 32 bits for numbers of 16 bits, else the same."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def merging_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which results of many tiles are added up: float64 or complex128; that of integers stays."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def has_gradients(dtype: torch.dtype) -> bool:
    """True if tensors of a type may require grad."""
    return dtype.is_floating_point or dtype.is_complex


class Op(ABC):
    """Base class of operators.

    Attributes:
        kind: Kind of the operator's rule, for plans and messages.
        uniform: On a tile of one constant value, the result depends only on that value and on the distances to the
            borders; see [Note: identical tiles] in `execute.tile_pass`.
    """

    kind: ClassVar[str]
    uniform: ClassVar[bool] = False

    @property
    def approximation(self) -> str:
        """Description of an operator that approximates the user's; empty for an exact one."""
        return ""

    @property
    def drawn(self) -> bool:
        """True if the operator has random parameters of one step: no later step has the same operator."""
        return False


class TileOp(Op):
    """Operator that computes an output tile from input tiles."""

    @abstractmethod
    def need(self, box: Box) -> tuple[Box, ...]:
        """Return for each input map the box that the output box depends on, clipped to the map."""

    @abstractmethod
    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """Compute the output on ``box`` from input tiles that hold exactly ``need(box)``."""

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Return the state, besides the input tiles and their sizes, that the output on an interval of an axis depends
        on: by default its position. See [Note: tapes] in `program.tape`."""
        return lo, hi

    def tile_padding(self, box: Box) -> Sequence[int]:
        """Return the padding of the input tile of a box; empty for an operator without padding."""
        return ()

    def makes_padded_copy(self, box: Box) -> bool:
        """True if computing a box makes a padded copy of its input."""
        return False

    def is_concatenation(self, box: Box) -> bool:
        """True if the result on a box is a concatenation, whereas on other boxes it may be a view of its input."""
        return False

    def part_bounds(self, axis: int) -> Sequence[int]:
        """Return the positions on an axis of the result at which one part, computed by itself, ends and the next
        begins."""
        return ()

    @property
    def inputs_in_pieces(self) -> tuple[int, ...]:
        """Indices of the input maps that `apply` can read as `Pieces`, either all of them or none."""
        return ()

    @property
    def returns_view(self) -> bool:
        """True if `apply` returns a view of a new tensor: autograd then copies on a write in place."""
        return False

    def kernel_for(self, box: Box) -> Kernel:
        """Return `apply` for a box, as a kernel for all boxes with the same sizes and marks."""
        return partial(self.apply, box)

    def unread(self, box: Box) -> Kernel | None:
        """Return a kernel that has the gradients of `apply` and computes no result, for results that backward does not
        read; None if there is no such kernel. See [Note: unread] in `rules.unread`."""
        return None

    def apply_whole(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor | None:
        """Compute the whole output from whole maps by PyTorch's own operator; None if `apply` does the same."""
        return None


class AxisMap(Protocol):
    """Index arithmetic of an operator along one axis: from positions of the result to positions of the input."""

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the interval of the input, clipped and not empty, that results ``[lo, hi)`` read."""

    def mark(self, lo: int, hi: int) -> Hashable:
        """Return the state that results ``[lo, hi)`` depend on besides their input: see `TileOp.mark`."""


@dataclass(frozen=True)
class SeparableOp(TileOp):
    """Operator that is separable in its axes.

    Attributes:
        maps: Index arithmetic along each axis.
        axes: These axes; positions along all others stay the same.
    """

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
        """Return the box's interval along each of the axes."""
        return [(box.lo[a], box.hi[a]) for a in self.axes]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Input tile that is too large for memory and is read in pieces; see [Note: pieces] in `rules.attention_pieces`.

    Attributes:
        ends: Positions between the pieces along their dimension, both ends included.
        read: Reads a piece by its index.
        add_gradient: Adds the gradient of a piece; None if no gradient is needed.
        token: Tensor without data that stands for the tile in autograd; it requires grad if gradients are needed.
    """

    ends: tuple[int, ...]
    read: Callable[[int], Tensor]
    add_gradient: Callable[[int, Tensor], None] | None
    token: Tensor

    @property
    def intervals(self) -> Iterator[tuple[int, int]]:
        return itertools.pairwise(self.ends)


@dataclass(frozen=True)
class Reduction:
    """Accumulator of a reduce operator: tensors in a wide type, merged over tiles in tile order."""

    parts: tuple[Tensor, ...]

    def to(self, device: torch.device | str) -> Reduction:
        return replace(self, parts=tuple(t.to(device) for t in self.parts))


class ReduceOp(Op):
    """Operator that reduces a map, tile by tile, to vectors.

    Forward merges in a numerically stable form (`partial`, `merge`, `finish`). Backward differentiates `pull`: plain
    sums over the tile's own positions, with the final vectors as constants. Its derivatives, summed over tiles, are the
    reduction's.
    """

    kind = "reduce"

    def need(self, box: Box) -> tuple[Box, ...]:
        """Return the box of each input map for an owned box of the first."""
        return (box,)

    @abstractmethod
    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        """Reduce a tile."""

    @abstractmethod
    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        """Combine the reductions of two sets of tiles."""

    def contribution(self, boxes: Sequence[Box], tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        """Return the contribution of identical tiles, of which the first was computed."""
        return self.repeat(self.partial(boxes[0], tiles, vectors), len(boxes))

    def needs_tile(self, box: Box) -> bool:
        """True unless the result is known not to need the tile of a box: one that an interrupted run has written."""
        return True

    @property
    def start(self) -> Reduction | None:
        """The accumulator before the first tile, of a result that may need none."""
        return None

    def result_slice(self, box: Box) -> Hashable:
        """Return a key of the slice of the results to which a tile contributes; None is all of them."""
        return None

    def repeat(self, part: Reduction, times: int) -> Reduction:
        """Return the contribution of ``times`` identical tiles: merge a tile's with itself, by doubling."""
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
    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results from the reduction of all tiles."""

    @property
    def compares_results(self) -> bool:
        """True if backward compares tiles with the results for equality, as for a maximum."""
        return False

    def needs_backward_results(self, outputs: Sequence[Tensor], shared: bool) -> bool:
        """True if `pull` needs results that are computed on the tiles of backward: those of forward may differ in the
        last bits.

        Args:
            outputs: The results of forward.
            shared: One tile of backward may stand for several identical ones.
        """
        return False

    @abstractmethod
    def pull(
        self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Return a differentiable tensor for each output; None for an output without gradient."""

    def pull_with_grad(
        self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Run `pull` with grad enabled, and make expanded gradients of the tiles contiguous.

        The gradient of a sum is an expanded scalar. PyTorch's kernels sum such a view with fewer digits than a
        contiguous tensor, which the gradient of PyTorch's own mean is.
        """
        for tile in tiles:
            if tile.requires_grad:
                tile.register_hook(contiguous)
        with torch.enable_grad():
            return self.pull(box, tiles, vectors, outputs)


def contiguous(gradient: Tensor) -> Tensor:
    return gradient.contiguous() if 0 in gradient.stride() else gradient


@dataclass(frozen=True)
class VectorOp(Op):
    """Call on vectors only."""

    kind: ClassVar[str] = "vector"
    call: Call

    def run(self, tensors: Sequence[Tensor]) -> Any:
        return self.call(tensors)


@dataclass(frozen=True)
class Barrier(Op):
    """Call that needs its maps whole.

    Attributes:
        call: The call.
        reason: The reason, for plans and messages.
        writes_input: The call writes into its first argument, which is cloned before, and is the result.
    """

    kind: ClassVar[str] = "barrier"
    call: Call
    reason: str
    writes_input: bool = False

    def run(self, tensors: Sequence[Tensor]) -> Any:
        if not self.writes_input:
            return self.call(tensors)
        result = tensors[0].clone()
        self.call([result, *tensors[1:]])
        return result


@dataclass(frozen=True)
class Source(Op):
    """Image that is read box by box.

    Attributes:
        location: "here" is a tensor on the device, "memory" a tensor on another one, "elsewhere" a `TileSource`.
        prefetches: The source prefetches boxes.
        instances: Number of last axes that count images.
        reads_all_images: The source reads a box of all images at once.
    """

    kind: ClassVar[str] = "source"
    location: Literal["here", "memory", "elsewhere"]
    prefetches: bool = False
    instances: int = 0
    reads_all_images: bool = False


@dataclass(frozen=True)
class Captured(Op):
    """Tensor that the recorded code used: a parameter, a buffer, a target."""

    kind: ClassVar[str] = "captured"


@dataclass(frozen=True)
class Spread(Op):
    """Vector with spatial dimensions that is used beside a map: each tile takes its slice of it."""

    kind: ClassVar[str] = "broadcast"
    layout: Layout


@dataclass(frozen=True)
class Gather(Op):
    """Map as one tensor, for a barrier or for the user."""

    kind: ClassVar[str] = "gather"


@dataclass(frozen=True)
class Autocast:
    """The autocast state under which a call was recorded."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def current(device: torch.device) -> Autocast:
        kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    @property
    def is_noop(self) -> bool:
        """True if replaying the state changes nothing."""
        return not self.enabled and not torch.is_autocast_enabled(self.device_type)

    def replay(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class Slot:
    """Placeholder of the i-th tensor in the arguments of a recorded call."""

    index: int


@dataclass(frozen=True)
class Call:
    """Function with its arguments; tensors are `Slot`s that are filled at each run."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    autocast: Autocast | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if self.autocast is None or self.autocast.is_noop:
            return self.fill_and_run(tensors)
        with self.autocast.replay():
            return self.fill_and_run(tensors)

    @cached_property
    def fill_and_run(self) -> Callable[[Sequence[Tensor]], Any]:
        """The call as a function of its tensors. If each tensor is an argument by itself, no structure is traversed."""
        func, args, kwargs = self.func, self.args, dict(self.kwargs)
        slots = [(i, a.index) for i, a in enumerate(args) if isinstance(a, Slot)]
        names = [(name, a.index) for name, a in kwargs.items() if isinstance(a, Slot)]
        if any(not isinstance(a, Slot) and has_slots(a) for a in (*args, *kwargs.values())):
            return lambda tensors: func(*fill(args, tensors), **{k: fill(v, tensors) for k, v in kwargs.items()})

        def run(tensors: Sequence[Tensor]) -> Any:
            filled = list(args)
            for i, index in slots:
                filled[i] = tensors[index]
            if names:
                return func(*filled, **{**kwargs, **{name: tensors[index] for name, index in names}})
            return func(*filled, **kwargs)

        return run

    @cached_property
    def as_kernel(self) -> Kernel:
        """The call as a kernel; fast if its tensors are the first arguments, as in most calls."""
        func, autocast, kwargs = self.func, self.autocast, dict(self.kwargs)
        count = next((i for i, a in enumerate(self.args) if not isinstance(a, Slot)), len(self.args))
        rest = self.args[count:]
        if [a.index for a in self.args[:count]] != list(range(count)) or has_slots((*rest, kwargs)):
            return lambda tiles, vectors: self([*tiles, *vectors])
        if autocast is None:
            return lambda tiles, vectors: func(*tiles, *vectors, *rest, **kwargs)

        def run(tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
            if autocast.is_noop:
                return func(*tiles, *vectors, *rest, **kwargs)
            with autocast.replay():
                return func(*tiles, *vectors, *rest, **kwargs)

        return run


def has_slots(template: Any) -> bool:
    """True if a template has slots."""
    if isinstance(template, dict):
        template = tuple(template.values())
    return isinstance(template, Slot) or (isinstance(template, (tuple, list)) and any(map(has_slots, template)))


def fill(template: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a template with its slots filled."""
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
