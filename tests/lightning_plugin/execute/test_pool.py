"""Buffers of transfers to lower tiers: lent again and again, never while in use, and gone when a pass is over."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_plugin import LazyImage
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.engine import Engine
from lightning_plugin.layout import Layout
from lightning_plugin.options import Options
from lightning_plugin.plans import Planner
from lightning_plugin.residency import transfer
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.residency.disk import DiskFile
from lightning_plugin.residency.tiers import Home, LowerMap
from lightning_plugin.residency.transfer import Buffer, Pool, TransferQueue

CPU = torch.device("cpu")


class Counted(Pool):
    """A pool that notes what it does; ``all`` are those of a test."""

    all: list[Counted]

    def __init__(self, open: bool = True, fakes: bool = False) -> None:
        super().__init__(open, fakes)
        self.lent: list[int] = []
        self.made: list[int] = []
        self.buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self.all.append(self)

    def lend(self, *args, **options) -> torch.Tensor:  # type: ignore[no-untyped-def]
        lent = super().lend(*args, **options)
        self.lent.append(lent.nbytes)
        return lent

    def make_buffer(self, size: int) -> Buffer:
        buffer = super().make_buffer(size)
        self.made.append(size)
        self.buffers.add(buffer)
        return buffer


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """Every pool from now on, in the order in which they were opened."""
    Counted.all = []
    monkeypatch.setattr(transfer, "Pool", Counted)
    return Counted.all


def filled(pool: Pool, value: float, count: int = 6) -> torch.Tensor:
    return pool.lend((count,), torch.float32).fill_(value)


# What is lent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_what_is_lent_is_an_ordinary_tensor_of_any_kind(dtype: torch.dtype) -> None:
    pool = Pool()
    for shape in ((2, 3, 5), (7,), (1, 1)):
        lent = pool.lend(shape, dtype, 100)
        assert (lent.shape, lent.dtype, lent.is_contiguous()) == (torch.Size(shape), dtype, True)
        assert lent.untyped_storage().nbytes() == lent.nbytes
        lent.fill_(1)
        assert bool((lent == 1).all())


def test_a_buffer_is_lent_again_when_nothing_refers_to_it(pools: list[Counted]) -> None:
    pool = Counted()
    one = filled(pool, 1.0)
    place = one.data_ptr()
    other = filled(pool, 2.0)
    assert other.data_ptr() != place
    del one
    assert filled(pool, 3.0, 5).data_ptr() == place
    assert len(pool.made) == 2


@pytest.mark.parametrize("way", ["tile", "view", "detached", "numpy", "saved by autograd"])
def test_a_buffer_is_not_lent_while_anything_refers_to_it(way: str) -> None:
    pool = Pool()
    lent = filled(pool, 5.0)
    weight = torch.ones(6, requires_grad=True)
    kept = {
        "tile": lambda t: t,
        "view": lambda t: t.view(2, 3)[1],
        "detached": lambda t: t.detach()[::2],
        "numpy": lambda t: t.numpy(),
        "saved by autograd": lambda t: (t * weight).sum(),
    }[way](lent)
    del lent
    others = [filled(pool, float(i)) for i in range(4)]
    if way == "saved by autograd":
        (gradient,) = torch.autograd.grad(kept, weight)
        assert gradient.tolist() == [5.0] * 6
    else:
        assert set(kept.tolist()) == {5.0}
    assert [set(o.tolist()) for o in others] == [{float(i)} for i in range(4)]


def test_there_are_never_more_buffers_than_were_lent_at_once() -> None:
    pool = Pool()
    for count in (1, 100, 10, 1000, 30):  # too small ones are replaced
        first, second = filled(pool, 1.0, count), filled(pool, 2.0, 2 * count)
        assert set(first.tolist()) == {1.0}
        assert set(second.tolist()) == {2.0}
        del first, second
        assert len(pool.free) == 2
    assert sum(b.size for b in pool.free) <= 4 * (2000 + 2000)


def test_the_smallest_buffer_that_is_large_enough_is_taken() -> None:
    pool = Pool()
    large, small = pool.lend((100,), torch.uint8), pool.lend((10,), torch.uint8)
    places = large.data_ptr(), small.data_ptr()
    del large, small
    small, large = pool.lend((9,), torch.uint8), pool.lend((90,), torch.uint8)
    assert (large.data_ptr(), small.data_ptr()) == places


def test_a_closed_pool_keeps_nothing_and_takes_nothing_back() -> None:
    pool = Pool()
    kept, gone = filled(pool, 7.0), filled(pool, 8.0)
    del gone
    pool.close()
    assert not pool.free
    assert kept.tolist() == [7.0] * 6
    del kept
    assert not pool.free


# Transfers


LAYOUT = Layout.channels_first((1, 2, 12, 10))


def written(ahead: bool) -> tuple[Boundary, TransferQueue, torch.Tensor]:
    """A map on the disk, and its values."""
    queue = TransferQueue(ahead)
    whole = torch.randn(LAYOUT.shape)
    handle = Boundary(LAYOUT, torch.float32, CPU, Home("disk", queue))
    handle.write([handle.whole], whole)
    return handle, queue, whole


@pytest.mark.parametrize("ahead", [False, True])
def test_a_fetched_tile_stays_what_it_is_while_it_is_kept(ahead: bool, pools: list[Counted]) -> None:
    handle, queue, whole = written(ahead)
    boxes = [box for (box,) in Grid((4, 2)).partition([LAYOUT.extent])]
    with queue.open_pool():
        kept, view = handle.read(boxes[0]), handle.read(boxes[1])[:, :, 1:, :2]
        for box in boxes * 3:
            handle.prefetch(box)
            assert torch.equal(handle.read(box), LAYOUT.narrow(whole, handle.whole, box))
            handle.cotangent.add(box, torch.ones(LAYOUT.tile_shape(box)), ahead)
        handle.cotangent.wait()
        (pool,) = [p for p in pools if len(p.lent) > 1]
        assert len(pool.made) <= 5
        assert len(pool.lent) > 40
    assert torch.equal(kept, LAYOUT.narrow(whole, handle.whole, boxes[0]))
    assert torch.equal(view, LAYOUT.narrow(whole, handle.whole, boxes[1])[:, :, 1:, :2])
    assert handle.cotangent.read(handle.whole).unique().tolist() == [3.0]


def test_every_tile_asks_for_what_the_largest_needs(pools: list[Counted]) -> None:
    handle, queue, _ = written(False)
    with queue.open_pool():
        handle.set_largest_tile(30)
        small = handle.read(Box((0, 0), (1, 2)))
        assert small.untyped_storage().nbytes() == 2 * 2 * 4
        assert pools[-1].made == [30 * 2 * 4]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_transfer_that_fails_says_so_and_frees_its_buffers(
    ahead: bool, pools: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> int:
        raise OSError("the disk is gone")

    handle, queue, _ = written(ahead)
    with pytest.raises(OSError, match="the disk is gone"), queue.open_pool():
        monkeypatch.setattr("os.pwrite", broken)
        handle.cotangent.add(handle.whole, torch.ones(LAYOUT.shape), ahead)
        handle.cotangent.wait()
    assert not queue.pool.open
    del handle, queue
    gc.collect()
    assert not [b for p in pools for b in p.buffers]


def test_outside_a_pass_a_transfer_has_a_buffer_of_its_own() -> None:
    lower_map = LowerMap(DiskFile(LAYOUT, torch.float32, CPU), TransferQueue())
    lower_map.write(Box.whole(LAYOUT.extent), torch.ones(LAYOUT.shape))
    one, other = lower_map.read(Box((0, 0), (2, 2))), lower_map.read(Box((0, 0), (2, 2)))
    assert one.data_ptr() != other.data_ptr()
    assert Pool().lender(Box((0, 0), (2, 2)), 0)((2, 2), torch.uint8).nbytes == 4


# Steps


def on_disk(count: int, ahead: bool, share: bool = False) -> Engine:
    """Every boundary on the disk, every segment on so many tiles (a scan's along one axis)."""
    grid = (count, 1) if share else (count, count)

    class Lower(Engine):
        def choose(self, recording):  # type: ignore[no-untyped-def]
            plan = super().choose(recording)
            halo = "share" if share else "recompute"
            segments = tuple(replace(s, tier="disk", ahead=ahead, halo=halo) for s in plan.segments)
            return replace(plan, segments=segments)

    return Lower(Planner(Options(tiles=grid, backward_tiles=grid)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.Conv2d(6, 4, 3, padding=1),
        nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip


def step(engine: Engine, side: int = 64) -> None:
    torch.manual_seed(1)
    network()(LazyImage.from_tensor(torch.randn(1, 3, side, side), engine=engine)).square().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.full), True])
def test_more_tiles_make_no_more_buffers(ahead: bool, pools: list[Counted]) -> None:
    """Passes of 16 and of 64 tiles. (Of four tiles each is at a corner and all overlap with all others; which of a
    tile's input and cotangent is the larger, and so may take the other's buffer, changes with the share of halos.)"""
    found = []
    for count in (4, 8):
        pools.clear()
        step(on_disk(count, ahead))
        found.append([(len(p.lent), len(p.made)) for p in pools if len(p.lent) > 1])
    few, many = found
    assert len(few) == len(many) >= 6  # forward and backward
    assert [made for _, made in many] == [made for _, made in few]
    assert all(lent > 3 * before for (lent, _), (before, _) in zip(many, few, strict=True))
    assert max(made for _, made in many) <= (8 if ahead else 3)


def test_the_tiles_of_a_scan_share_buffers(pools: list[Counted]) -> None:
    counts = []
    for count in (4, 16):
        pools.clear()
        step(on_disk(count, False, share=True))
        counts.append([len(p.made) for p in pools if len(p.lent) > 1])
    assert len(counts[0]) == len(counts[1]) >= 6
    assert all(many <= few <= 3 for few, many in zip(*counts, strict=True))


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_left_after_a_step(ahead: bool, pools: list[Counted]) -> None:
    step(on_disk(4, ahead))
    assert pools
    assert not [b for p in pools for b in p.buffers]


def test_nothing_is_held_between_segments(pools: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """When a pass begins, no buffer of an earlier one is there."""
    left: list[int] = []
    begin = Counted.__init__

    def looking(self: Counted, open: bool = True, fakes: bool = False) -> None:
        left.append(sum(b.size for p in Counted.all for b in p.buffers))
        begin(self, open, fakes)

    monkeypatch.setattr(Counted, "__init__", looking)
    step(on_disk(4, True))
    assert len(left) > 6
    assert not any(left)
