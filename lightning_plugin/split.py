"""Split-CNN: windows see nothing beyond their own split of the image. An approximation, for whom asks for it.

Options import this file where ``halo`` asks for splits, and nothing else does.

[Note: split] A map is cut into *splits*, and a window that belongs to one of them sees that one alone: where it reaches
beyond, it is padded as it would be at the border of the map. So each split is a map of its own, with the operator's own
rule; windows begin where the unsplit operator's do, so that together the splits' results have its shape. An output cut
at O may have its input cut anywhere between the first input of its first window, O·stride - before, and the last of the
window before it, (O - 1)·stride + kernel - before: there the padding is never negative. The middle is taken, rounded
up, which for windows that are padded to keep a map's size is O·stride: maps of all strides are cut at the same places
of the image, and the two branches of a residual block agree. (Windows that are narrower than their stride leave inputs
out; there the bounds change places, and what lies between the windows belongs to either split.)

Where a map is cut belongs to the function, as padding does, and has nothing to do with tiles: on any tile grid the
result is the same. A tile that lies within a split needs no halo from beyond it; one with several computes one after
the other and joins them.

Only window operators are split, as in Split-CNN. A statistic is that of the whole map, and what acts on positions one
by one does not notice.

It begins where the user said a network is to be split to, and goes back to its images. A map that no split operator
reads further on is cut evenly, or as the step has drawn it; what that means for the maps before is said by their
readers' windows, each of which leaves some room. Whatever is not a window between them has to leave positions as they
are.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Clip, Window
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value, ancestors
from lightning_plugin.layout import Axis
from lightning_plugin.ops import Barrier, Gather, Kernel, TileOp
from lightning_plugin.rules.window import SlidingOp

#: Positions on one axis at which a map is split, its two ends included.
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Splitting:
    """A network is split from its image to a ``depth``: each axis of space into so many of ``counts`` splits.

    The depth is the path of a module, its own operators included, or a share of all window operators. ``wobble`` is how
    far a cut may lie from where even splits would have it, as a part of a split's side, and drawn anew in every step
    (the ω of Split-CNN); None is even splits.
    """

    counts: tuple[int, ...]
    depth: float | str
    wobble: float | None = None

    def __post_init__(self) -> None:
        if not self.counts or any(c < 1 for c in self.counts) or max(self.counts) == 1:
            raise ValueError(
                f"splits={self.counts}: at least one axis is cut into two splits or more, such as splits=2"
            )
        if not isinstance(self.depth, str) and not 0 < self.depth <= 1:
            raise ValueError(
                f"split_depth={self.depth}: a share of the network's window operators is more than 0 and at most 1; a "
                'path names a module, as split_depth="layer2" does'
            )
        if self.wobble is not None and not 0 <= self.wobble < 0.5:
            raise ValueError(f"wobble={self.wobble}: a cut stays on its own side of the next, so 0 <= wobble < 0.5")

    def count(self, axis: int) -> int:
        """Into how many splits an axis is cut; one number stands for all axes."""
        if len(self.counts) == 1:
            return self.counts[0]
        return self.counts[axis] if axis < len(self.counts) else 1

    def cuts(self, axis: int, size: int, key: int) -> Cuts:
        """The cuts of a map whose splits no operator behind it says: evenly, or as this step's ``key`` has it.

        The i-th of N - 1 cuts is ⌊i·L/N⌋, or uniform among the whole numbers from ⌈(i-ω)·L/N⌉ to ⌊(i+ω)·L/N⌋;
        where there are none, it is even.
        """
        count = self.count(axis)
        if size < count:
            raise PlanError(
                f"a map of {size} positions on axis {axis} cannot be cut into {count} splits: give fewer splits, a "
                "smaller split_depth or a larger image"
            )
        dice = random.Random(f"{key} {axis} {size}")
        inner = []
        for i in range(1, count):
            even = i * size // count
            wobble = self.wobble or 0.0
            low, high = math.ceil((i - wobble) * size / count), math.floor((i + wobble) * size / count)
            inner.append(even if self.wobble is None or high < low else dice.randint(low, high))
        return (0, *inner, size)

    def applied(self, nodes: Sequence[Node], trained: Set[int], space: int, key: Callable[[], int]) -> tuple[Node, ...]:
        """The nodes, with those split that are to be.

        ``trained`` are the numbers of window operators that a module in train mode has called: no others are split. The
        first ``space`` axes are those of space. ``key`` is what this step's cuts are drawn by.
        """
        windows = [n for n in nodes if n.serial in trained]
        if not windows:
            return tuple(nodes)
        chosen = windows[: until(self.depth, windows)]
        region = Region(self, space, key() if self.wobble is not None else 0)
        here, numbers = {n.serial for n in nodes}, {n.serial for n in chosen}
        for node in reversed(ancestors(v for n in chosen for v in n.outputs)):
            if node.serial in here and node.outputs:
                region.visit(node, node.serial in numbers)
        made = {n.serial: region.made(n) for n in chosen}
        return tuple(made.get(n.serial, n) for n in nodes)

    def __str__(self) -> str:
        grid = "x".join(map(str, self.counts)) if len(self.counts) > 1 else f"{self.counts[0]} along each axis"
        until = f"'{self.depth}'" if isinstance(self.depth, str) else f"{100 * self.depth:g} % of the window operators"
        drawn = "" if self.wobble is None else f", cut anew in each step (wobble {self.wobble:g})"
        return f"splits {grid} up to {until}{drawn}"


def rising(cuts: Cuts) -> bool:
    """True if every split has a position."""
    return all(a < b for a, b in itertools.pairwise(cuts))


@dataclass(frozen=True)
class Seam:
    """The split of an operator along one of its window dimensions, counted from a tensor's last: the cuts of what it
    reads and of what it makes."""

    dim: int
    reads: Cuts
    makes: Cuts


class Share(NamedTuple):
    """A box's part in one split, along one dimension: the split's number, and an interval of its own positions."""

    place: int
    lo: int
    hi: int


def bounds(window: Window, cut: int) -> tuple[int, int]:
    """Between which input cuts an output cut lies, in either order."""
    reach = window.dilation * (window.kernel - 1) + 1
    first, last = cut * window.stride - window.before, (cut - 1) * window.stride + reach - window.before
    return min(first, last), max(first, last)


@dataclass(frozen=True)
class Split(TileOp):
    """A window operator on each split by itself; see [Note: split]. ``by`` is what the user said."""

    kind: ClassVar[str] = "window"
    uniform: ClassVar[bool] = True
    inner: SlidingOp
    seams: tuple[Seam, ...]
    by: Splitting

    @property
    def approximation(self) -> str:
        return str(self.by)

    @property
    def drawn(self) -> bool:
        return self.by.wobble is not None

    def joints(self, axis: int) -> list[int]:
        return [c for s, a in zip(self.seams, self.inner.axes, strict=True) if a == axis for c in s.makes[1:-1]]

    def alone(self, places: Sequence[int]) -> SlidingOp:
        """The operator on one split as a map of its own."""
        windows, after = [], []
        extent = list(self.inner.extent)
        for place, seam, w, a in zip(places, self.seams, self.inner.windows, self.inner.axes, strict=True):
            lo, hi = seam.reads[place : place + 2]
            first, end = seam.makes[place : place + 2]
            windows.append(replace(w, before=lo + w.before - first * w.stride))
            reach = w.dilation * (w.kernel - 1) + 1
            last = hi == self.inner.extent[a]
            after.append(None if last else (end - 1) * w.stride + reach - w.before - hi)
            extent[a] = hi - lo
        return self.inner.on_split(tuple(windows), tuple(extent), after)

    def shares(self, dim: int, lo: int, hi: int) -> list[Share]:
        """The splits that an output interval has a part in."""
        cuts = self.seams[dim].makes
        return [
            Share(i, max(lo, a) - a, min(hi, b) - a)
            for i, (a, b) in enumerate(itertools.pairwise(cuts))
            if max(lo, a) < min(hi, b)
        ]

    def clip(self, dim: int, share: Share) -> Clip:
        """The interval of the whole map that a share reads along a dimension, and its padding."""
        places = [share.place if d == dim else 0 for d in range(len(self.seams))]
        op, start = self.alone(places), self.seams[dim].reads[share.place]
        found = Clip.at(*op.windows[dim].need(share.lo, share.hi), op.extent[op.axes[dim]])
        return Clip(found.lo + start, found.hi + start, found.before, found.after)

    def along(self, box: Box) -> list[list[Share]]:
        """The shares of a box, dimension by dimension."""
        return [self.shares(d, box.lo[a], box.hi[a]) for d, a in enumerate(self.inner.axes)]

    def need(self, box: Box) -> tuple[Box, ...]:
        for d, (a, shares) in enumerate(zip(self.inner.axes, self.along(box), strict=True)):
            box = box.replace(a, self.clip(d, shares[0]).lo, self.clip(d, shares[-1]).hi)
        return (box,)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return self.bound(box)(tiles, vectors)

    def bound(self, box: Box) -> Kernel:
        (whole,) = self.need(box)
        along = self.along(box)
        dims = [seam.dim for seam in self.seams]
        parts = []
        for shares in itertools.product(*along):
            op, own = self.alone([s.place for s in shares]), box
            for share, a in zip(shares, self.inner.axes, strict=True):
                own = own.replace(a, share.lo, share.hi)
            clips = [self.clip(d, share) for d, share in enumerate(shares)]
            reads = [
                (dim, clip.lo - whole.lo[a], clip.hi - clip.lo)
                for dim, clip, a in zip(dims, clips, self.inner.axes, strict=True)
            ]
            parts.append((reads, op.bound(own)))

        def kernel(tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
            made = []
            for reads, run in parts:
                x = tiles[0]
                for dim, start, length in reads:
                    x = x.narrow(dim, start, length)
                made.append(run([x], vectors))
            return joined(made, [len(shares) for shares in along], dims)

        return kernel

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """The positions of the splits in the tile, and the padding of each."""
        found: list[Hashable] = []
        for d, a in enumerate(self.inner.axes):
            if a == axis:
                shares = self.shares(d, lo, hi)
                start = self.clip(d, shares[0]).lo
                for share in shares:
                    clip = self.clip(d, share)
                    places = [share.place if e == d else 0 for e in range(len(self.seams))]
                    found.append((clip.lo - start, clip.hi - start, self.alone(places).mark(axis, share.lo, share.hi)))
        return tuple(found)

    def pads(self, box: Box) -> list[int]:
        """The interval and the padding of each split's part of a tile."""
        found = []
        for d, shares in enumerate(self.along(box)):
            clips = [self.clip(d, share) for share in shares]
            for clip in clips:
                found += [clip.lo - clips[0].lo, clip.hi - clip.lo, clip.before, clip.after]
        return found

    def pads_by_hand(self, box: Box) -> bool:
        """Joining the results of several splits takes as much as padding one does."""
        along = self.along(box)
        if any(len(shares) > 1 for shares in along):
            return True
        own = box
        for (share,), a in zip(along, self.inner.axes, strict=True):
            own = own.replace(a, share.lo, share.hi)
        return self.alone([share.place for (share,) in along]).pads_by_hand(own)


def joined(tiles: Sequence[Tensor], counts: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Tiles that lie side by side, in row-major order, as one."""
    for count, dim in reversed(list(zip(counts, dims, strict=True))):
        if count > 1:
            tiles = [torch.cat(list(tiles[i : i + count]), dim) for i in range(0, len(tiles), count)]
    return tiles[0]


WAY_OUT = "Give a smaller split_depth, so that the network is split only up to the operators before it."

#: From where to where each cut on an axis may lie, the ends left out; the label of the reader that says so.
Limits = tuple[str, tuple[tuple[int, int], ...]]


def until(depth: float | str, windows: Sequence[Node]) -> int:
    """The number of window operators before a depth, in the order of their calls."""
    if not isinstance(depth, str):
        return max(1, round(depth * len(windows)))
    inside = [i for i, n in enumerate(windows) if n.path == depth or n.path.startswith(f"{depth}.")]
    if not inside:
        known = ", ".join(repr(n.path) for n in windows)
        raise PlanError(
            f"split_depth={depth!r} is the path of no module that calls a window operator; those that do are {known}"
        )
    return inside[-1] + 1


@dataclass
class Region:
    """The part of a network that is split, gone through from its end back to its images.

    ``limits`` are what the readers of each map leave to its cuts, axis by axis; ``cuts`` are the cuts of the maps whose
    readers are all known.
    """

    how: Splitting
    space: int
    key: int
    limits: dict[tuple[Value, int], list[Limits]] = field(default_factory=lambda: defaultdict(list))
    cuts: dict[tuple[Value, int], Cuts] = field(default_factory=dict)

    def visit(self, node: Node, chosen: bool) -> None:
        """Go on from what a node makes to what it reads."""
        known = node.op if isinstance(node.op, Split) else None
        if chosen:
            self.through(node)
        elif known is not None:  # an earlier run of the same recording has split it
            for a, seam in zip(known.inner.axes, known.seams, strict=True):
                self.demand(node, node.maps[0], a, points(seam.reads))
        elif isinstance(node.op, (Gather, Barrier)):
            raise PlanError(f"{node.label} runs whole, so what lies before it cannot be split. {WAY_OUT}")
        elif isinstance(node.op, TileOp) and node.op.kind != "window":
            self.carry(node)

    def through(self, node: Node) -> None:
        """A window operator leaves the cuts of its input some room."""
        op = node.op
        if not isinstance(op, SlidingOp):
            raise PlanError(
                f"{node.label} cannot be split: convolutions can, and pooling whose indices nobody reads. {WAY_OUT}"
            )
        for a, window in zip(op.axes, op.windows, strict=True):
            self.demand(node, node.maps[0], a, tuple(bounds(window, cut) for cut in self.of(node.outputs[0], a)[1:-1]))

    def carry(self, node: Node) -> None:
        """Cut the inputs of operators that leave positions as they are like their results."""
        out = node.outputs[0]
        extent = out.space.extent
        for a in range(len(extent)):
            if (out, a) not in self.limits:
                continue
            cuts = self.of(out, a)
            for lo, hi in pairwise(cuts):
                box = Box.whole(extent).replace(a, lo, hi)
                for v, wanted in zip(node.maps, node.op.need(box), strict=True):  # type: ignore[attr-defined]
                    if len(v.space.extent) != len(extent) or wanted != box.broadcast(v.space.extent):
                        raise PlanError(
                            f"{node.label} moves positions or reads others than its own, so splits would not be on "
                            f"their own behind it. {WAY_OUT}"
                        )
            for v in node.maps:
                if v.space.extent[a] == extent[a]:
                    self.demand(node, v, a, points(cuts))

    def demand(self, node: Node, v: Value, axis: int, limits: tuple[tuple[int, int], ...]) -> None:
        """A reader of a map says from where to where its cuts may lie."""
        self.limits[v, axis].append((node.label, limits))

    def of(self, v: Value, axis: int) -> Cuts:
        """The cuts of a map whose readers are all known: the middle of what they leave, rounded up."""
        if (v, axis) not in self.cuts:
            size, readers = v.space.extent[axis], self.limits.get((v, axis), [])
            if axis >= self.space:
                found: Cuts = (0, size)
            elif not readers:
                found = self.how.cuts(axis, size, self.key)
            else:
                room = [
                    (max(lo for lo, _ in cut), min(hi for _, hi in cut))
                    for cut in zip(*(limits for _, limits in readers), strict=True)
                ]
                if any(lo > hi for lo, hi in room):
                    names = " and ".join(dict.fromkeys(name for name, _ in readers))
                    raise PlanError(f"{names} read one map and would have it cut at different places. {WAY_OUT}")
                found = (0, *(-(-(lo + hi) // 2) for lo, hi in room), size)
            if not rising(found):
                raise PlanError(
                    f"the result of {v.label} has {size} positions on axis {axis} and would be cut at {found[1:-1]}, "
                    "which leaves a split empty: give fewer splits, a smaller split_depth or a larger image"
                )
            self.cuts[v, axis] = found
        return self.cuts[v, axis]

    def made(self, node: Node) -> Node:
        """A node whose operator is split, in place of one that is not."""
        x, out, op = node.maps[0], node.outputs[0], node.op
        assert isinstance(op, SlidingOp)
        dims = dims_of(node, op.axes)
        seams = tuple(Seam(d, self.of(x, a), self.of(out, a)) for d, a in zip(dims, op.axes, strict=True))
        return Node(
            Split(op, seams, self.how), node.inputs, node.outputs, node.name, node.path, node.inplace, node.serial
        )


def points(cuts: Cuts) -> tuple[tuple[int, int], ...]:
    """Limits that leave no room."""
    return tuple((cut, cut) for cut in cuts[1:-1])


def dims_of(node: Node, axes: Sequence[int]) -> list[int]:
    """The dimensions that an operator slides over, counted from the last."""
    dims = node.maps[0].space.dims
    return [next(d for d, dim in enumerate(dims) if dim == (Axis(a),)) - len(dims) for a in axes]
