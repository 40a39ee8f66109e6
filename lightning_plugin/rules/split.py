"""Window operators whose splits see nothing of each other.

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
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Clip, Window
from lightning_plugin.graph import Node
from lightning_plugin.ops import Kernel, Op, TileOp
from lightning_plugin.rules.pooling import Squeezed
from lightning_plugin.rules.window import SlidingOp
from lightning_plugin.splitting import Cuts, Splitting


@dataclass(frozen=True)
class Seam:
    """Where an operator is split along one of its window dimensions, counted from a tensor's last: the cuts of what it
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
        """What a share reads of the whole map along a dimension, and what it pads."""
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
        """How the splits lie in the tile, and what each pads."""
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
        """What each split's part of a tile reads and pads."""
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


def sliding(op: Op) -> SlidingOp | None:
    """The part of an operator that slides, where it can be split."""
    if isinstance(op, Squeezed):
        op = op.inner
    return op if isinstance(op, SlidingOp) else None


def split_of(op: Op) -> Split | None:
    """The part of an operator that is split, if any."""
    if isinstance(op, Squeezed):
        op = op.inner
    return op if isinstance(op, Split) else None


def splits_of(nodes: Iterable[Node]) -> list[tuple[Node, Split]]:
    """The nodes that are split."""
    return [(n, split) for n in nodes if (split := split_of(n.op)) is not None]


def drawn(nodes: Iterable[Node]) -> bool:
    """Whether nodes are split at places that the step has drawn."""
    return any(split.by.wobble is not None for _, split in splits_of(nodes))


def approximation(nodes: Iterable[Node]) -> str:
    """What a plan for these nodes says of their splits; nothing where nothing is split."""
    found = splits_of(nodes)
    if not found:
        return ""
    last, split = found[-1]
    return f"{split.by}: {len(found)} window operators, the last of them {last.label}"
