"""Background: where maps are known to be constant, gradients of which only sums matter, and plans that count on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, make_plan, materialize
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.constants import MIN_CELL_SIDE, Constants
from lightning_plugin.execute.backward import Backward
from lightning_plugin.execute.gradients import RecalledCotangent
from lightning_plugin.execute.tile_pass import TilePass
from lightning_plugin.graph import Image
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.planner.analysis.background import parts_of_background
from tests.exactness import TOLERANCE, compare, flat
from tests.lightning_plugin.background import Background
from tests.lightning_plugin.outside import account
from tests.lightning_plugin.test_identical_tiles import counted
from tests.lightning_plugin.test_store import lower
from tests.zoo import ZOO, fill
from tests.zoo.resnet import BasicBlock, ResNet

VALUE = 0.7


def slide(size: tuple[int, int], tissue: Box, batch: int = 1, dtype: torch.dtype = torch.float64) -> Background:
    x = torch.full((batch, 3, *size), VALUE, dtype=dtype)
    part = (..., *(slice(lo, hi) for lo, hi in tissue.intervals()))
    x[part] = torch.randn(x[part].shape, dtype=dtype)
    return Background(x, tissue, VALUE)


def random_box(extent: tuple[int, ...]) -> Box:
    lo = [int(torch.randint(0, n, (1,))) for n in extent]
    return Box.of((a, int(torch.randint(a + 1, n + 1, (1,)))) for a, n in zip(lo, extent, strict=True))


def at_positions(layout: Layout, whole: Tensor, box: Box) -> list[list[float]]:
    """The values of each position of a box, one position after the other."""
    found = []
    for index in Grid(box.extent).indices():
        lo = tuple(a + i for a, i in zip(box.lo, index, strict=True))
        one = Box(lo, tuple(a + 1 for a in lo))
        found.append(layout.narrow(whole, Box.whole(layout.extent), one).flatten().tolist())
    return found


# What is known


@given(
    extent=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    on_axis=st.integers(1, 6),
    seed=st.integers(0, 999),
    joined=st.booleans(),
)
def test_what_was_written_is_known_where_it_is_constant_and_nowhere_else(
    extent: tuple[int, ...], counts: tuple[int, ...], on_axis: int, seed: int, joined: bool
) -> None:
    torch.manual_seed(seed)
    layout = Layout.channels_first((1, 2, *extent))
    if joined and extent[2] == 1:  # an axis of one position lies nowhere
        layout = Layout(((2,), (Axis(0), Axis(1)), (3,)), extent)
    elif joined:
        layout = Layout(((2, Axis(2)), (Axis(0), Axis(1)), (3,)), extent)
    whole, all_of_it = torch.zeros(layout.shape), Box.whole(extent)
    for value in range(int(torch.randint(0, 4, (1,)))):
        box = random_box(extent)
        layout.write_into(whole, all_of_it, torch.full(layout.tile_shape(box), float(value % 3)), box)
    constants = Constants(extent, on_axis)
    for (box,) in Grid(counts).partition([extent]):
        if not box.empty:
            key = constants.mark_tile(layout, layout.narrow(whole, all_of_it, box), box)
            values = at_positions(layout, whole, box)
            assert (key is not None) == all(v == values[0] for v in values)
    for _ in range(4):
        box = random_box(extent)
        cells = constants.positions(Box.of((s.start, s.stop) for s in constants.cells_of(box)))
        values = at_positions(layout, whole, cells)
        assert (constants.key_of_box(box) is not None) == all(v == values[0] for v in values)
        assert constants.has_constant(box) >= (constants.key_of_box(box) is not None)


@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)), seed=st.integers(0, 999), on_axis=st.integers(1, 40),
)  # fmt: skip
def test_an_image_is_asked_until_all_is_known(size: tuple[int, int], seed: int, on_axis: int) -> None:
    torch.manual_seed(seed)
    source = slide(size, random_box(size))
    found = Constants.from_source(size, source.constant, on_axis, 1 << 13)
    cells = Constants(size, on_axis, 1 << 13)
    for index in Grid(cells.cells.shape).indices():
        box = cells.positions(Box(index, tuple(i + 1 for i in index)))
        known = found is not None and found.key_of_box(box) is not None
        assert known == (source.constant(box) is not None)


def test_a_source_that_knows_nothing_is_not_asked_for_ever() -> None:
    asked: list[Box] = []

    def constant(box: Box) -> None:
        asked.append(box)

    assert Constants.from_source((100_000, 80_000), constant, 64, 1 << 13) is None
    assert len(asked) < 600


def test_a_small_image_is_not_asked_about_every_few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on it would take less time than the questions."""
    asked: list[Box] = []
    before = Background.constant
    monkeypatch.setattr(Background, "constant", lambda self, box: asked.append(box) or before(self, box))
    known = Image.of(slide((256, 200), Box((30, 30), (170, 170))), torch.device("cpu")).background
    assert known is not None and known.key_of_box(Box((176, 176), (256, 200))) is not None
    cells = [-(-size // MIN_CELL_SIDE) for size in (256, 200)]
    assert len(asked) < 2 * cells[0] * cells[1]


# What only sums matter of


class Skips(nn.Module):
    """Convolutions that shrink the map, each joined by a way around it: several boundaries, read twice."""

    def __init__(self, depth: int, norm: bool, stride: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, stride, 1, bias=not norm), nn.BatchNorm2d(4) if norm else nn.Tanh(),
                nn.Conv2d(4, 4, 3, 1, 1),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.around = nn.ModuleList(nn.Conv2d(4, 4, 1, stride) for _ in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for block, around in zip(self.blocks, self.around, strict=True):
            x = torch.relu(block(x) + around(x))
        return x.mean((2, 3)), x.square().sum((2, 3))


def pulls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many identical tiles each evaluation of backward pulled back together, from now on."""
    found: list[int] = []
    before = Backward.sum_cotangents

    def noted(self: Backward, members: list[object]) -> object:
        found.append(len(members))
        return before(self, members)  # type: ignore[arg-type]

    monkeypatch.setattr(Backward, "sum_cotangents", noted)
    return found


def assert_same_gradients(
    plain: nn.Module, tiled: TiledModule, source: Background, separate: bool, dense: bool = False
) -> None:
    expected = flat(plain(source.tensor))
    image = LazyImage.from_tensor(source.tensor) if dense else LazyImage(source)
    actual = [materialize(a) for a in flat(tiled(image))]
    weights = [torch.randn_like(e) for e in expected]
    for outs in (expected, actual):
        losses = [(o * w).sum() for o, w in zip(outs, weights, strict=True)]
        if separate:  # the second pass comes to the same boundaries once more
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        else:
            sum(losses).backward()  # type: ignore[union-attr]
    found = compare(plain, tiled.module, actual, expected, (None, None))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.slow
@given(
    depth=st.integers(1, 4), norm=st.booleans(), stride=st.integers(1, 2), batch=st.integers(1, 2),
    size=st.tuples(st.integers(24, 60), st.integers(24, 60)), tiles=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    back=st.tuples(st.integers(2, 8), st.integers(2, 8)), separate=st.booleans(), seed=st.integers(0, 99),
    dense=st.booleans(), tier=st.sampled_from(["device", "host", "disk"]), ahead=st.booleans(), recall=st.booleans(),
)  # fmt: skip
def test_gradients_of_background_are_those_of_plain_pytorch(
    depth: int, norm: bool, stride: int, batch: int, size: tuple[int, int], tiles: tuple[int, int],
    back: tuple[int, int], separate: bool, seed: int, dense: bool, tier: str, ahead: bool,
    recall: bool,
) -> None:  # fmt: skip
    assume(min(size) >= 8 * stride**depth)
    torch.manual_seed(seed)
    plain = Skips(depth, norm, stride).double()
    source = slide(size, random_box(size), batch)
    tiled = TiledModule(copy.deepcopy(plain))
    tiled.engine = lower(tier, ahead, tiles, back, recall)
    assert_same_gradients(plain, tiled, source, separate, dense)


@pytest.mark.slow
def test_gradients_of_background_are_pulled_back_for_one_tile_where_only_weights_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the cotangents of background differ from place to place, near tissue and far."""
    torch.manual_seed(0)
    plain = Skips(3, True, 2).double()
    source = slide((192, 192), Box((0, 0), (20, 192)))
    found = pulls(monkeypatch)
    tiled = TiledModule(copy.deepcopy(plain), tiles=(12, 12), backward_tiles=(12, 12))
    assert_same_gradients(plain, tiled, source, separate=False)
    assert tiled.plan is not None and len(tiled.plan.segments) > 2
    assert sum(count > 60 for count in found) == 1, sorted(found)[-20:]  # the segment that reads the image


class Centred(nn.Module):
    """Less its mean, of which the gradient is one number for all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x - x.mean((2, 3), keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), Centred()], ids=["batch norm", "mean"])
def test_tiles_for_which_another_stands_are_read_back_once(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a map's statistics add to its cotangent is the same in all of them."""
    shares: list[Box] = []
    before = RecalledCotangent.reduction_share
    monkeypatch.setattr(RecalledCotangent, "reduction_share", lambda self, box: shares.append(box) or before(self, box))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), norm, nn.ReLU()).double()
    source = slide((256, 256), Box((0, 0), (16, 256)))
    tiled = TiledModule(copy.deepcopy(plain))
    tiled.engine = lower("device", False, (32, 32), (32, 32), recall=True)
    found = pulls(monkeypatch)
    out, expected = materialize(tiled(LazyImage(source))), plain(source.tensor)
    shares.clear()
    for made in (out, expected):
        made.mean((2, 3)).square().sum().backward()
    assert max(compare(plain, tiled.module, [out], [expected], (None, None)).values()) < TOLERANCE
    assert max(found) > 300 and len(shares) < 400, (sorted(found)[-5:], len(shares))


def test_tiles_that_the_user_chose_are_shared_where_a_source_may_know_of_background() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).double()
    tiled = TiledModule(net, tiles=(3, 3))
    for image, shared in ((slide((24, 20), Box((3, 3), (9, 9))), True), (torch.randn(1, 3, 24, 20).double(), False)):
        materialize(tiled(LazyImage(image) if isinstance(image, Background) else image))
        assert tiled.plan is not None and [s.alike for s in tiled.plan.segments] == [shared]


# Plans


def resnet() -> nn.Module:
    return fill(ZOO["resnet18"].build())


@pytest.mark.slow
def test_a_slide_of_which_most_is_background_is_planned_to_take_less_time() -> None:
    net = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=2).eval()  # whose statistics add to no cotangent
    image = torch.empty(1).expand(1, 3, 1024, 1024)  # which nobody reads
    slides = [Background(image, Box((0, 0), (side, side)), VALUE) for side in (128, 1024)]
    background, tissue = (make_plan(net, LazyImage(source), budget="160MiB") for source in slides)
    assert background.seconds < 0.7 * tissue.seconds
    assert any(s.alike for s in background.segments) and not any(s.alike for s in tissue.segments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "train"),
    [pytest.param(0.3, True, marks=pytest.mark.full), (0.55, False), pytest.param(0.8, True, marks=pytest.mark.full)],
)
def test_no_plan_is_slower_for_background(part: float, train: bool) -> None:
    """What is known of background may be left alone, from any segment on."""
    net = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=2).train(train)
    side = 768
    image = torch.empty(1).expand(1, 3, side, side)  # which nobody reads
    tissue = round(side * (1 - part) ** 0.5)
    slides = [Background(image, Box((0, 0), (end, end)), VALUE) for end in (tissue, side)]
    background, plain = (make_plan(net, LazyImage(source), budget="160MiB") for source in slides)
    assert background.seconds <= 1.01 * plain.seconds, f"{background}\n{plain}"


def test_nobody_looks_at_background_behind_the_last_segment_that_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Skips(2, True, 1).double()
    source = slide((64, 64), Box((0, 0), (8, 64)))
    tiled = TiledModule(net, tiles=(4, 4), backward_tiles=(4, 4))
    tiled(LazyImage(source))[0].sum().backward()
    assert tiled.plan is not None and all(s.alike for s in tiled.plan.segments)
    for last in range(len(tiled.plan.segments) + 1):
        looked: set[int] = set()
        before = TilePass.all_tiles

        def work(self: TilePass, looked: set[int] = looked, before: object = before) -> object:
            if self.segment.rehearsal is None and self.segment.known_constants:
                looked.add(self.segment.place)
            return before(self)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(TilePass, "all_tiles", work)
            segments = tuple(replace(s, alike=i < last) for i, s in enumerate(tiled.plan.segments))
            once = TiledModule(net, plan=replace(tiled.plan, segments=segments))
            once(LazyImage(source))[0].sum().backward()
        assert looked == set(range(last))


@pytest.mark.slow
@pytest.mark.usefixtures("free_tiles")
@pytest.mark.parametrize("train", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_plan_for_background_keeps_its_budget_and_is_exact(train: bool) -> None:
    torch.manual_seed(0)
    plain = resnet().double().train(train)
    background = slide((640, 640), Box((0, 0), (64, 64)))
    tiled = TiledModule(copy.deepcopy(plain), budget="24MiB")
    found = account(lambda: sum(o.square().sum() for o in flat(tiled(LazyImage(background)))).backward(), tiled.module)  # type: ignore[union-attr]
    assert tiled.plan is not None and any(s.alike for s in tiled.plan.segments)
    assert found.held <= 24 * 2**20
    sum(o.square().sum() for o in flat(plain(background.tensor))).backward()  # type: ignore[union-attr]
    for (name, mine), theirs in zip(tiled.module.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        worst = (mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert worst < TOLERANCE, name


@pytest.mark.slow
@pytest.mark.usefixtures("free_tiles")
def test_a_padded_batch_is_planned_as_background() -> None:
    torch.manual_seed(0)
    plain, x = Skips(3, False, 2).double(), torch.zeros(1, 3, 512, 512, dtype=torch.float64)
    x[..., :100, :100].normal_()
    tiled = TiledModule(copy.deepcopy(plain), budget="10MiB")
    count = counted(tiled)

    def step() -> None:
        sum(o.square().sum() for o in tiled(LazyImage.from_tensor(x))).backward()

    found = account(step, tiled.module)
    assert tiled.plan is not None and any(s.alike for s in tiled.plan.segments)
    assert found.held <= 10 * 2**20 and count.saved > 0
    sum(o.square().sum() for o in plain(x)).backward()
    for mine, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert (mine.grad - theirs.grad).abs().max() < TOLERANCE * theirs.grad.abs().max()
    assert not any(s.alike for s in make_plan(plain, torch.zeros_like(x), budget="10MiB").segments)
    with torch.no_grad():
        evaluated = make_plan(plain, LazyImage.from_tensor(x), budget="10MiB")
    assert any(s.alike for s in evaluated.segments)


def test_slides_of_as_much_background_share_a_plan() -> None:
    def known(share: float) -> Constants | None:
        side = round(512 * (1 - share) ** 0.5)
        return Constants.from_source((512, 512), slide((512, 512), Box((0, 0), (side, side))).constant, 64, 1 << 13)

    parts: Callable[[float], tuple[int, ...]] = lambda share: parts_of_background([known(share)])  # noqa: E731
    assert parts(0.84) == parts(0.86) != parts(0.6)
    assert parts(0.0) == () == parts_of_background([None])
