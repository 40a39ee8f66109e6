"""Split-CNN: windows see nothing beyond their own split of the image. An approximation, which a user has to ask for.

Only `options` imports this file, if ``halo`` asks for splits.

[Note: split] A map is cut into *splits*, and a window operator computes each split as if it were a whole map: windows
that reach beyond the split are padded, as at the border of the map. Windows begin at the positions of the unsplit
operator's, so that the results of all splits together have its shape.

The cuts of an operator's output bound those of its input. For an output cut at O, the input may be cut anywhere between
the first input of the window at O, O·stride - before, and the last input of the window at O - 1, (O - 1)·stride +
kernel - before: there no padding is negative. The middle is taken, rounded up. For windows padded to keep a map's size
it is O·stride: maps of all strides are cut at the same places of the image, and the two branches of a residual block
agree. (Windows narrower than their stride skip inputs; there the two bounds change places, and the skipped inputs may
belong to either split.)

The cuts are part of the function that is computed, as padding is, and independent of tiles: the result is the same on
any tile grid. A tile within one split needs no halo from beyond it; a tile across several computes them one after the
other and joins the results.

Only window operators are split, as in Split-CNN. Statistics are those of the whole map, and pointwise operators are not
affected.

Cuts are chosen from the user's depth back to the images (`SplitRegion`). The outputs of the last split operators are
cut evenly, or at random for the step; the maps before them by the bounds of all their readers. Operators between
windows have to keep positions as they are.
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

#: Positions along one axis at which a map is cut, from 0 to its size, both included.
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Splitting:
    """The user's splits: the network is split from its images to a depth.

    Attributes:
        counts: Number of splits along each spatial axis; one number is for all axes.
        depth: Path of the last module that is split, or the share of all window operators that are split.
        wobble: Largest distance of a random cut from the even one, as a part of a split's side (the ω of Split-CNN).
            Cuts are drawn in every step. None is even splits.
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
        """Return the number of splits along an axis."""
        if len(self.counts) == 1:
            return self.counts[0]
        return self.counts[axis] if axis < len(self.counts) else 1

    def cuts(self, axis: int, size: int, key: int) -> Cuts:
        """Choose the cuts of a map that no split operator reads: even ones, or random ones by the step's ``key``.

        The i-th of N - 1 even cuts is ⌊i·L/N⌋. With a wobble ω the i-th cut is drawn from the integers between
        ⌈(i-ω)·L/N⌉ and ⌊(i+ω)·L/N⌋; if there are none, it is the even one.
        """
        count = self.count(axis)
        if size < count:
            raise PlanError(
                f"a map of {size} positions on axis {axis} cannot be cut into {count} splits: give fewer splits, a "
                "smaller split_depth or a larger image"
            )
        generator = random.Random(f"{key} {axis} {size}")
        inner = []
        for i in range(1, count):
            even = i * size // count
            wobble = self.wobble or 0.0
            low, high = math.ceil((i - wobble) * size / count), math.floor((i + wobble) * size / count)
            inner.append(even if self.wobble is None or high < low else generator.randint(low, high))
        return (0, *inner, size)

    def rewrite(self, nodes: Sequence[Node], trained: Set[int], space: int, key: Callable[[], int]) -> tuple[Node, ...]:
        """Replace the first window operators by split ones.

        Args:
            nodes: All nodes.
            trained: Serial numbers of the window operators in modules in train mode: no others are split.
            space: Number of spatial axes, which come first.
            key: Returns the seed of this step's random cuts.
        """
        windows = [n for n in nodes if n.serial in trained]
        if not windows:
            return tuple(nodes)
        chosen = windows[: count_windows(self.depth, windows)]
        region = SplitRegion(self, space, key() if self.wobble is not None else 0)
        known, split = {n.serial for n in nodes}, {n.serial for n in chosen}
        for node in reversed(ancestors(v for n in chosen for v in n.outputs)):
            if node.serial in known and node.outputs:
                region.visit(node, node.serial in split)
        replaced = {n.serial: region.split_node(n) for n in chosen}
        return tuple(replaced.get(n.serial, n) for n in nodes)

    def __str__(self) -> str:
        grid = "x".join(map(str, self.counts)) if len(self.counts) > 1 else f"{self.counts[0]} along each axis"
        until = f"'{self.depth}'" if isinstance(self.depth, str) else f"{100 * self.depth:g} % of the window operators"
        drawn = "" if self.wobble is None else f", cut anew in each step (wobble {self.wobble:g})"
        return f"splits {grid} up to {until}{drawn}"


def is_increasing(cuts: Cuts) -> bool:
    """True if no split is empty."""
    return all(a < b for a, b in pairwise(cuts))


@dataclass(frozen=True)
class Seam:
    """Cuts of a window operator along one dimension.

    Attributes:
        dim: The dimension of the tensors, counted from the last.
        input_cuts: Cuts of the input.
        output_cuts: Cuts of the output.
    """

    dim: int
    input_cuts: Cuts
    output_cuts: Cuts


class Part(NamedTuple):
    """Part of a box in one split, along one dimension: the split's index, and an interval counted from its begin."""

    split: int
    lo: int
    hi: int


def input_cut_bounds(window: Window, cut: int) -> tuple[int, int]:
    """Return the smallest and the largest input cut for an output cut; see [Note: split]."""
    reach = window.dilation * (window.kernel - 1) + 1
    first, last = cut * window.stride - window.before, (cut - 1) * window.stride + reach - window.before
    return min(first, last), max(first, last)


@dataclass(frozen=True)
class Split(TileOp):
    """Window operator that computes each split as a map of its own; see [Note: split].

    Attributes:
        inner: The operator that is split.
        seams: The cuts along each dimension of its windows.
        splitting: The user's splits.
    """

    kind: ClassVar[str] = "window"
    uniform: ClassVar[bool] = True
    inner: SlidingOp
    seams: tuple[Seam, ...]
    splitting: Splitting

    @property
    def approximation(self) -> str:
        return str(self.splitting)

    @property
    def drawn(self) -> bool:
        return self.splitting.wobble is not None

    def part_bounds(self, axis: int) -> list[int]:
        return [c for s, a in zip(self.seams, self.inner.axes, strict=True) if a == axis for c in s.output_cuts[1:-1]]

    def op_on_split(self, splits: Sequence[int]) -> SlidingOp:
        """Return the operator for one split, given by its index along each dimension."""
        windows, after = [], []
        extent = list(self.inner.extent)
        for split, seam, w, a in zip(splits, self.seams, self.inner.windows, self.inner.axes, strict=True):
            lo, hi = seam.input_cuts[split : split + 2]
            first, end = seam.output_cuts[split : split + 2]
            windows.append(replace(w, before=lo + w.before - first * w.stride))
            reach = w.dilation * (w.kernel - 1) + 1
            last = hi == self.inner.extent[a]
            after.append(None if last else (end - 1) * w.stride + reach - w.before - hi)
            extent[a] = hi - lo
        return self.inner.on_split(tuple(windows), tuple(extent), after)

    def parts(self, dim: int, lo: int, hi: int) -> list[Part]:
        """Divide an output interval among the splits."""
        cuts = self.seams[dim].output_cuts
        return [
            Part(i, max(lo, a) - a, min(hi, b) - a)
            for i, (a, b) in enumerate(pairwise(cuts))
            if max(lo, a) < min(hi, b)
        ]

    def clip(self, dim: int, part: Part) -> Clip:
        """Return the interval of the whole map that a part reads along a dimension, and its padding."""
        splits = [part.split if d == dim else 0 for d in range(len(self.seams))]
        op, start = self.op_on_split(splits), self.seams[dim].input_cuts[part.split]
        clip = Clip.at(*op.windows[dim].need(part.lo, part.hi), op.extent[op.axes[dim]])
        return Clip(clip.lo + start, clip.hi + start, clip.before, clip.after)

    def parts_of(self, box: Box) -> list[list[Part]]:
        """Divide a box among the splits, dimension by dimension."""
        return [self.parts(d, box.lo[a], box.hi[a]) for d, a in enumerate(self.inner.axes)]

    def need(self, box: Box) -> tuple[Box, ...]:
        for d, (a, parts) in enumerate(zip(self.inner.axes, self.parts_of(box), strict=True)):
            box = box.replace(a, self.clip(d, parts[0]).lo, self.clip(d, parts[-1]).hi)
        return (box,)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return self.kernel_for(box)(tiles, vectors)

    def kernel_for(self, box: Box) -> Kernel:
        (input_box,) = self.need(box)
        parts_by_dim = self.parts_of(box)
        dims = [seam.dim for seam in self.seams]
        kernels = []
        for parts in itertools.product(*parts_by_dim):
            op, split_box = self.op_on_split([part.split for part in parts]), box
            for part, a in zip(parts, self.inner.axes, strict=True):
                split_box = split_box.replace(a, part.lo, part.hi)
            clips = [self.clip(d, part) for d, part in enumerate(parts)]
            slices = [
                (dim, clip.lo - input_box.lo[a], clip.hi - clip.lo)
                for dim, clip, a in zip(dims, clips, self.inner.axes, strict=True)
            ]
            kernels.append((slices, op.kernel_for(split_box)))

        def kernel(tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
            results = []
            for slices, run in kernels:
                x = tiles[0]
                for dim, start, length in slices:
                    x = x.narrow(dim, start, length)
                results.append(run([x], vectors))
            return join_tiles(results, [len(parts) for parts in parts_by_dim], dims)

        return kernel

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Return the positions of the splits in the tile, and the mark of each."""
        marks: list[Hashable] = []
        for d, a in enumerate(self.inner.axes):
            if a == axis:
                parts = self.parts(d, lo, hi)
                start = self.clip(d, parts[0]).lo
                for part in parts:
                    clip = self.clip(d, part)
                    op = self.op_on_split([part.split if e == d else 0 for e in range(len(self.seams))])
                    marks.append((clip.lo - start, clip.hi - start, op.mark(axis, part.lo, part.hi)))
        return tuple(marks)

    def tile_padding(self, box: Box) -> list[int]:
        """Return the interval and the padding of each split's part of a tile."""
        pads = []
        for d, parts in enumerate(self.parts_of(box)):
            clips = [self.clip(d, part) for part in parts]
            for clip in clips:
                pads += [clip.lo - clips[0].lo, clip.hi - clip.lo, clip.before, clip.after]
        return pads

    def makes_padded_copy(self, box: Box) -> bool:
        """True for a tile across several splits too: joining their results takes as much memory as padding one."""
        parts_by_dim = self.parts_of(box)
        if any(len(parts) > 1 for parts in parts_by_dim):
            return True
        split_box = box
        for (part,), a in zip(parts_by_dim, self.inner.axes, strict=True):
            split_box = split_box.replace(a, part.lo, part.hi)
        return self.op_on_split([part.split for (part,) in parts_by_dim]).makes_padded_copy(split_box)


def join_tiles(tiles: Sequence[Tensor], counts: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Concatenate a grid of tiles, given in row-major order."""
    for count, dim in reversed(list(zip(counts, dims, strict=True))):
        if count > 1:
            tiles = [torch.cat(list(tiles[i : i + count]), dim) for i in range(0, len(tiles), count)]
    return tiles[0]


ADVICE = "Give a smaller split_depth, so that the network is split only up to the operators before it."

#: A reader's label, and the smallest and largest position that it allows for each inner cut along one axis.
Limits = tuple[str, tuple[tuple[int, int], ...]]


def count_windows(depth: float | str, windows: Sequence[Node]) -> int:
    """Count the window operators down to a depth, in the order of their calls."""
    if not isinstance(depth, str):
        return max(1, round(depth * len(windows)))
    inside = [i for i, n in enumerate(windows) if n.path == depth or n.path.startswith(f"{depth}.")]
    if not inside:
        known = ", ".join(repr(n.path) for n in windows)
        raise PlanError(
            f"split_depth={depth!r} is the path of no module that calls a window operator; give one of {known}"
        )
    return inside[-1] + 1


@dataclass
class SplitRegion:
    """Part of a network that is split, visited from its end back to its images.

    Attributes:
        splitting: The user's splits.
        space: Number of spatial axes.
        key: Seed of random cuts.
        limits: Limits of each map's cuts along an axis, by its readers visited so far.
        cuts: Cuts of each map along an axis, once all its readers are visited.
    """

    splitting: Splitting
    space: int
    key: int
    limits: dict[tuple[Value, int], list[Limits]] = field(default_factory=lambda: defaultdict(list))
    cuts: dict[tuple[Value, int], Cuts] = field(default_factory=dict)

    def visit(self, node: Node, chosen: bool) -> None:
        """Limit the cuts of a node's inputs by those of its outputs; ``chosen`` nodes are to be split."""
        earlier = node.op if isinstance(node.op, Split) else None
        if chosen:
            self.limit_window_input(node)
        elif earlier is not None:  # an earlier run of the same recording has split it
            for a, seam in zip(earlier.inner.axes, earlier.seams, strict=True):
                self.add_limits(node, node.maps[0], a, exact_limits(seam.input_cuts))
        elif isinstance(node.op, (Gather, Barrier)):
            raise PlanError(f"{node.label} runs whole, so the operators before it cannot be split. {ADVICE}")
        elif isinstance(node.op, TileOp) and node.op.kind != "window":
            self.limit_pointwise_inputs(node)

    def limit_window_input(self, node: Node) -> None:
        """Limit the cuts of a window operator's input to those without negative padding."""
        op = node.op
        if not isinstance(op, SlidingOp):
            raise PlanError(
                f"{node.label} cannot be split: convolutions can, and pooling whose indices nobody reads. {ADVICE}"
            )
        for a, window in zip(op.axes, op.windows, strict=True):
            cuts = self.cuts_of(node.outputs[0], a)
            self.add_limits(node, node.maps[0], a, tuple(input_cut_bounds(window, cut) for cut in cuts[1:-1]))

    def limit_pointwise_inputs(self, node: Node) -> None:
        """Have the inputs of an operator that keeps positions cut like its output."""
        out = node.outputs[0]
        extent = out.space.extent
        for a in range(len(extent)):
            if (out, a) not in self.limits:
                continue
            cuts = self.cuts_of(out, a)
            for lo, hi in pairwise(cuts):
                box = Box.whole(extent).replace(a, lo, hi)
                for v, wanted in zip(node.maps, node.op.need(box), strict=True):  # type: ignore[attr-defined]
                    if len(v.space.extent) != len(extent) or wanted != box.broadcast(v.space.extent):
                        raise PlanError(
                            f"{node.label} moves positions or reads neighbouring ones, so that a split would depend on "
                            f"the others. {ADVICE}"
                        )
            for v in node.maps:
                if v.space.extent[a] == extent[a]:
                    self.add_limits(node, v, a, exact_limits(cuts))

    def add_limits(self, node: Node, v: Value, axis: int, limits: tuple[tuple[int, int], ...]) -> None:
        """Add a reader's limits to those of a map's cuts."""
        self.limits[v, axis].append((node.label, limits))

    def cuts_of(self, v: Value, axis: int) -> Cuts:
        """Return the cuts of a map whose readers are all visited: the middle of their limits, rounded up."""
        if (v, axis) not in self.cuts:
            size, readers = v.space.extent[axis], self.limits.get((v, axis), [])
            if axis >= self.space:
                cuts: Cuts = (0, size)
            elif not readers:
                cuts = self.splitting.cuts(axis, size, self.key)
            else:
                limits = [
                    (max(lo for lo, _ in cut), min(hi for _, hi in cut))
                    for cut in zip(*(limits for _, limits in readers), strict=True)
                ]
                if any(lo > hi for lo, hi in limits):
                    names = " and ".join(dict.fromkeys(name for name, _ in readers))
                    raise PlanError(f"{names} read one map and would have it cut at different places. {ADVICE}")
                cuts = (0, *(-(-(lo + hi) // 2) for lo, hi in limits), size)
            if not is_increasing(cuts):
                raise PlanError(
                    f"the result of {v.label} has {size} positions on axis {axis} and would be cut at {cuts[1:-1]}, "
                    "which leaves a split empty: give fewer splits, a smaller split_depth or a larger image"
                )
            self.cuts[v, axis] = cuts
        return self.cuts[v, axis]

    def split_node(self, node: Node) -> Node:
        """Return a copy of a node whose operator is split."""
        x, out, op = node.maps[0], node.outputs[0], node.op
        assert isinstance(op, SlidingOp)
        dims = window_dims(node, op.axes)
        seams = tuple(Seam(d, self.cuts_of(x, a), self.cuts_of(out, a)) for d, a in zip(dims, op.axes, strict=True))
        split = Split(op, seams, self.splitting)
        return Node(split, node.inputs, node.outputs, node.name, node.path, node.inplace, node.serial)


def exact_limits(cuts: Cuts) -> tuple[tuple[int, int], ...]:
    """Return limits that allow only these cuts."""
    return tuple((cut, cut) for cut in cuts[1:-1])


def window_dims(node: Node, axes: Sequence[int]) -> list[int]:
    """Return the dimensions that an operator slides over, counted from the last."""
    dims = node.maps[0].space.dims
    return [next(d for d, dim in enumerate(dims) if dim == (Axis(a),)) - len(dims) for a in axes]
