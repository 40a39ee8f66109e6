"""The tiers: what is written to one is read from it, and a plan may put any boundary on any tier."""

import errno
import gc
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, TileSource, make_plan, materialize
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.constants import TileNumbers
from lightning_plugin.engine import Engine
from lightning_plugin.errors import EngineError
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.options import Options
from lightning_plugin.plan import SegmentPlan
from lightning_plugin.plans import Planner
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.residency.disk import DiskFile, UnnamedFile, copy_in_file_order
from lightning_plugin.residency.tiers import Home, LowerMap
from lightning_plugin.residency.transfer import TransferQueue
from tests.exactness import asked, assert_exact

CPU = torch.device("cpu")


def planned(
    change: Callable[[int, SegmentPlan], SegmentPlan], forward: tuple[int, ...], backward: tuple[int, ...]
) -> Engine:
    """The plan of so many tiles, of which each segment, by its place, is changed."""

    class Changed(Engine):
        def choose(self, recording):  # type: ignore[no-untyped-def]
            plan = super().choose(recording)
            return replace(plan, segments=tuple(change(i, s) for i, s in enumerate(plan.segments)))

    return Changed(Planner(Options(tiles=forward, backward_tiles=backward)))


def lower(
    tier: str, ahead: bool, forward: tuple[int, ...] = (3, 2), backward: tuple[int, ...] = (2, 3), recall: bool = False
) -> Engine:
    """Every boundary on a lower tier, its tiles transferred at once or ahead, and read back where they can be."""

    return planned(lambda i, s: replace(s, tier=tier, ahead=ahead, recall=recall), forward, backward)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
    st.sampled_from(["device", "host", "disk"]),
    st.booleans(),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2)),
    st.data(),
)
def test_a_map_comes_back_as_it_was_written(
    dtype: torch.dtype,
    tier: str,
    ahead: bool,
    extent: tuple[int, ...],
    counts: tuple[int, ...],
    data: st.DataObject,
) -> None:
    layout = data.draw(
        st.sampled_from(
            [Layout.channels_first((1, 3, *extent)), Layout(((2, Axis(2)), (Axis(0), Axis(1)), (3,)), extent)]
        )
    )
    whole = torch.randint(0, 100, layout.shape).to(dtype)
    queue = TransferQueue(ahead)
    handle = Boundary(layout, dtype, CPU, Home(tier, queue))
    for (box,) in Grid(counts).partition([extent]):
        handle.write([box], layout.narrow(whole, handle.whole, box), ahead)
    lo = tuple(data.draw(st.integers(0, n - 1)) for n in extent)
    box = Box(lo, tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(lo, extent, strict=True)))
    handle.prefetch(box)
    assert torch.equal(handle.read(box), layout.narrow(whole, handle.whole, box))
    handle.wait()


def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each piece that is written to a file, from now on."""
    found: list[int] = []
    before = UnnamedFile.write

    def write(self: UnnamedFile, part: memoryview, offset: int) -> None:
        found.append(part.nbytes)
        before(self, part, offset)

    monkeypatch.setattr(UnnamedFile, "write", write)
    return found


@pytest.mark.parametrize("images", [(1, 4), (0, 7)])
def test_some_images_of_a_bag_are_one_piece_of_a_file(images: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = written(monkeypatch)
    layout = Layout.channels_first((7, 3, 5, 6), instances=1)
    first, last = images
    box = Box((0, 0, first), (5, 6, last))
    handle = Boundary(layout, torch.float32, CPU, Home("disk", TransferQueue(False)))
    tile = torch.rand(layout.tile_shape(box))
    handle.write([box], tile, False)
    handle.wait()
    assert pieces == [tile.nbytes]
    assert torch.equal(handle.read(box), tile)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_tile_of_one_number_may_have_any_strides(tier: str, dtype: torch.dtype) -> None:
    """PyTorch takes it for contiguous, and reads its bytes only where its last stride is one."""
    whole = torch.arange(9).to(dtype).view(1, 1, 3, 3)
    handle = Boundary(Layout.channels_first((1, 1, 1, 1)), dtype, CPU, Home(tier, TransferQueue(False)))
    handle.write([Box.whole((1, 1))], whole.transpose(2, 3).as_strided((1, 1, 1, 1), (9, 9, 9, 9), 4), ahead=False)
    handle.prefetch(Box.whole((1, 1)))
    assert handle.read(Box.whole((1, 1))).item() == 4
    handle.wait()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_fetched_is_what_was_written_however_long_that_takes(tier: str) -> None:
    """Also of a layout of which no part is a view."""
    layout, extent = Layout(((2, Axis(2)), (Axis(0), Axis(1)), (3,)), (4, 5, 3)), (4, 5, 3)
    queue, box = TransferQueue(ahead=True), Box((1, 1, 1), (3, 4, 2))
    handle = Boundary(layout, torch.float32, CPU, Home(tier, queue))
    slow = threading.Event()
    assert queue.thread is not None
    queue.thread.submit(slow.wait, 5)
    handle.write([Box.whole(extent)], torch.ones(layout.shape), ahead=True)
    handle.prefetch(box)
    threading.Timer(0.2, slow.set).start()
    assert bool((handle.read(box) == 1).all())
    handle.wait()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_overlapping_gradients_add_up_in_a_wide_type(tier: str, ahead: bool) -> None:
    layout = Layout.channels_first((1, 2, 5, 7))
    cotangent = Cotangent(layout, torch.bfloat16, CPU, Home(tier, TransferQueue(ahead)))
    for _ in range(300):
        cotangent.add(Box((0, 0), (4, 5)), torch.ones(1, 2, 4, 5), ahead)
    cotangent.add(Box((3, 4), (5, 7)), torch.ones(1, 2, 2, 3), ahead)
    cotangent.wait()
    got = cotangent.read(Box((3, 3), (5, 7)))
    assert got.dtype == torch.bfloat16
    # 300 ones summed in bfloat16 would stop at 256.
    assert got[0, 0].tolist() == [[300.0, 301.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]] or got[0, 0, 0, 0] == 300


@pytest.mark.parametrize("threads", [1, 3])
@given(
    st.lists(st.sampled_from([1, 2, 3, 16, 33]), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.booleans(),
    st.data(),
)
def test_a_tile_is_put_in_any_order(
    threads: int, shape: list[int], dtype: torch.dtype, cut: bool, data: st.DataObject
) -> None:
    """Also where it is a part of another: by any kernel, each number is where it belongs."""
    before = torch.get_num_threads()
    order = data.draw(st.permutations(range(len(shape))))
    whole = torch.arange(math.prod(shape) * (3 if cut else 1)).view(*shape[:-1], -1).to(dtype)
    tile = whole[..., : shape[-1]].permute(order)
    room = torch.full(tile.shape, 77, dtype=dtype)
    torch.set_num_threads(threads)
    try:
        found = copy_in_file_order(tile, room)
    finally:
        torch.set_num_threads(before)
    assert found is room and room.is_contiguous() and found.tolist() == tile.tolist()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_boundaries_on_lower_tiers_are_exact(tier: str, ahead: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(True), nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5),
        nn.MaxPool2d(2), nn.Conv2d(5, 4, 3), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    assert_exact(net, (2, 3, 41, 37), engine=lower(tier, ahead))


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_disk_that_fills_up_in_the_middle_ends_the_step(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    image = LazyImage.from_tensor(torch.randn(1, 3, 20, 24), engine=lower("disk", ahead))
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(EngineError, match=r"No space left.*disk=<another folder>"):
        small()(image).sum().backward()


def test_threads_open_maps_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one counts what the maps of all have still to fill, another adds its own."""
    layout = Layout.channels_first((1, 1, 2, 2))
    right = DiskFile.unallocated_bytes.fget
    assert right is not None
    maps, made = [DiskFile(layout, torch.float32, CPU) for _ in range(3)], []

    def slowly(self: DiskFile) -> int:
        if not made:
            made.append(threading.Thread(target=lambda: maps.append(DiskFile(layout, torch.float32, CPU))))
            made[0].start()
            made[0].join(0.2)  # until it is done, or waits
        return right(self)

    monkeypatch.setattr(DiskFile, "unallocated_bytes", property(slowly))
    maps.append(DiskFile(layout, torch.float32, CPU))
    made[0].join()
    assert len(maps) == 5


def test_no_thread_outlives_its_step() -> None:
    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("transfers")]

    loss = small()(LazyImage.from_tensor(torch.randn(1, 3, 20, 24), engine=lower("disk", True))).sum()
    assert float(loss.detach()) != 0
    assert threads()
    loss.backward()
    del loss
    gc.collect()
    for thread in threads():
        thread.join(10)
    assert not threads()


def test_a_full_disk_is_said_before_it_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": 1000})())
    with pytest.raises(EngineError, match="disk=<a folder with more room>"):
        DiskFile(Layout.channels_first((1, 8, 100, 100)), torch.float32, CPU, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_disk_without_space_for_all_maps_is_said_before_the_first_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle = (m for _ in range(3) for m in (nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 7, padding=3)))
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *middle), torch.randn(1, 3, 200, 200)
    tiled = TiledModule(net, budget="2MiB", disk=str(tmp_path))
    stored = make_plan(net, tuple(x.shape), budget="2MiB").stored_on("disk")
    assert stored == 3 * 4 * 8 * 200 * 200  # three maps, so that none is refused by itself
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": stored - 1})())
    read: list[Box] = []

    class Seen(TileSource):
        shape, dtype = tuple(x.shape), x.dtype

        def read(self, box: Box) -> Tensor:
            read.append(box)
            return x[:, :, *(slice(*side) for side in box.intervals())]

    with pytest.raises(EngineError, match=r"storing maps of .* disk=<a folder with more room>"):
        materialize(tiled(LazyImage(Seen())).sum())
    assert not read
    monkeypatch.undo()
    materialize(tiled(LazyImage(Seen())).sum()).backward()
    assert read


def test_room_is_promised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are sparse: what a first map has still to fill is not free for a second."""
    layout = Layout.channels_first((1, 8, 100, 100))
    size = 4 * 8 * 100 * 100
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": int(1.5 * size)})())
    first = DiskFile(layout, torch.float32, CPU, str(tmp_path))
    with pytest.raises(EngineError, match="beside the maps that are there"):
        DiskFile(layout, torch.float32, CPU, str(tmp_path))
    del first
    DiskFile(layout, torch.float32, CPU, str(tmp_path))


def test_what_is_stored_once_is_promised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles for which others stand are never written: their room is free for a second map."""
    layout = Layout.channels_first((1, 8, 100, 100))
    size = 4 * 8 * 100 * 100
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": int(1.5 * size)})())
    made = TileNumbers.empty([[0, 50, 100], [0, 25, 50, 75, 100]])
    first = DiskFile(layout, torch.float32, CPU, str(tmp_path), made)
    assert first.unallocated_bytes == size
    made.assign([Box((0, 25 * x), (50, 25 * x + 25)) for x in range(4)], 1)
    made.assign([Box((50, 0), (100, 25)), Box((50, 75), (100, 100))], 2)
    assert made.shared_positions == 4 * 50 * 25
    assert first.unallocated_bytes == size // 2
    DiskFile(layout, torch.float32, CPU, str(tmp_path))


def test_a_folder_for_the_disk_is_used_and_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'/no/such/folder' is not a folder that can be written to"):
        asked(disk="/no/such/folder")
    used = []
    monkeypatch.setattr(DiskFile, "open", lambda self, size, folder: used.append(folder))
    engine = lower("disk", False)
    engine.planner.options = replace(engine.options, disk=str(tmp_path))
    image = LazyImage.from_tensor(torch.randn(1, 3, 20, 24), engine=engine)
    with pytest.raises(AttributeError):  # there is no file
        small()(image).sum().backward()
    assert used[0] == str(tmp_path)


def test_a_file_has_no_name_that_a_crash_could_leave_behind(tmp_path: Path) -> None:
    file = DiskFile(Layout.channels_first((1, 8, 10, 10)), torch.float32, CPU, str(tmp_path))
    assert not list(tmp_path.iterdir())
    lower_map = LowerMap(file, TransferQueue())
    lower_map.write(Box.whole((10, 10)), torch.ones(1, 8, 10, 10))
    assert lower_map.read(Box((9, 9), (10, 10))).sum() == 8


@pytest.mark.parametrize("ahead", [False, True])
def test_a_normalised_tile_from_the_disk_has_plain_strides(ahead: bool) -> None:
    """PyTorch's BatchNorm backward is wrong for a tile of one image whose batch dimension has an odd stride."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.norm = nn.Linear(2, 2), nn.BatchNorm2d(2)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]
            return [y, self.norm(y)]

    assert_exact(Gated(), (1, 2, 7, 6), engine=lower("disk", ahead, (1, 1), (1, 1)))


def test_a_normalised_join_of_tiles_from_the_disk_has_plain_strides() -> None:
    """A map of one channel lies in memory in both orders at once, and what it is joined with decides."""

    class Joined(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            centred = x - x.mean((0, 2), keepdim=True)
            return [centred, F.group_norm(torch.cat([x, centred], 1), 1)]

    assert_exact(Joined(), (1, 1, 7, 6), engine=lower("disk", False, (1, 1), (1, 1)))
