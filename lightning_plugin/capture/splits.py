"""Splitting a recording: which window operators are split, and where; see [Note: split] in `rules.split`.

It begins where the user said a network is to be split to, and goes back to its images. A map that no split operator
reads further on is cut evenly, or as the step has drawn it; what that means for the maps before is said by their
readers' windows, each of which leaves some room. Whatever is not a window between them has to leave positions as they
are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lightning_plugin.boxes import Box
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value, ancestors
from lightning_plugin.layout import Axis
from lightning_plugin.ops import Barrier, Gather, TileOp
from lightning_plugin.rules.pooling import Squeezed
from lightning_plugin.rules.split import Seam, Split, bounds, sliding, split_of
from lightning_plugin.splitting import Cuts, Splitting, rising

WAY_OUT = "Give a smaller split_depth, so that the network is split only up to the operators before it."

#: From where to where each cut on an axis may lie, the ends left out; the label of the reader that says so.
Limits = tuple[str, tuple[tuple[int, int], ...]]


def split(
    nodes: Sequence[Node], trained: Set[int], how: Splitting, space: int, key: Callable[[], int]
) -> tuple[Node, ...]:
    """The nodes, with those split that are to be.

    ``trained`` are the numbers of window operators that a module in train mode has called: no others are split. The
    first ``space`` axes are those of space. ``key`` is what this step's cuts are drawn by.
    """
    windows = [n for n in nodes if n.serial in trained]
    if not windows:
        return tuple(nodes)
    chosen = windows[: until(how.depth, windows)]
    region = Region(how, space, key() if how.wobble is not None else 0)
    here, numbers = {n.serial for n in nodes}, {n.serial for n in chosen}
    for node in reversed(ancestors(v for n in chosen for v in n.outputs)):
        if node.serial in here and node.outputs:
            region.visit(node, node.serial in numbers)
    made = {n.serial: region.made(n) for n in chosen}
    return tuple(made.get(n.serial, n) for n in nodes)


def until(depth: float | str, windows: Sequence[Node]) -> int:
    """How many of the window operators, in the order of their calls, lie before a depth."""
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
        known = split_of(node.op)
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
        op = sliding(node.op)
        if op is None:
            raise PlanError(
                f"{node.label} cannot be split: convolutions can, and pooling whose indices nobody reads. {WAY_OUT}"
            )
        for a, window in zip(op.axes, op.windows, strict=True):
            self.demand(node, node.maps[0], a, tuple(bounds(window, cut) for cut in self.of(node.outputs[0], a)[1:-1]))

    def carry(self, node: Node) -> None:
        """What leaves positions as they are has its inputs cut as its result is."""
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
        x, out, op = node.maps[0], node.outputs[0], sliding(node.op)
        assert op is not None
        dims = dims_of(node, op.axes)
        seams = tuple(Seam(d, self.of(x, a), self.of(out, a)) for d, a in zip(dims, op.axes, strict=True))
        whole = Split(op, seams, self.how)
        new = replace(node.op, inner=whole) if isinstance(node.op, Squeezed) else whole
        return Node(new, node.inputs, node.outputs, node.name, node.path, node.inplace, node.serial)


def points(cuts: Cuts) -> tuple[tuple[int, int], ...]:
    """Limits that leave no room."""
    return tuple((cut, cut) for cut in cuts[1:-1])


def dims_of(node: Node, axes: Sequence[int]) -> list[int]:
    """The dimensions that an operator slides over, counted from the last, as its inner operator has them."""
    if isinstance(node.op, Squeezed):
        return [i - len(axes) for i in range(len(axes))]
    dims = node.maps[0].space.dims
    return [next(d for d, dim in enumerate(dims) if dim == (Axis(a),)) - len(dims) for a in axes]
