"""Background in tensors, in bags and in what kept segments make, and what lower tiers store of it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, Plan, TiledModule, materialize
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.constants import Constants, TileNumbers
from lightning_plugin.engine import Engine
from lightning_plugin.graph import Image, Recording, background_of
from lightning_plugin.layout import Layout
from lightning_plugin.ops import ReduceOp, TileOp
from lightning_plugin.options import Options
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.plans import Planner
from lightning_plugin.program.program import Program, Target
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.residency.tiers import Home
from lightning_plugin.residency.transfer import TransferQueue
from lightning_plugin.source import TensorSource
from lightning_plugin.source import batch as together
from tests.exactness import TOLERANCE
from tests.lightning_plugin.background import Background
from tests.lightning_plugin.test_background import VALUE, Skips, random_box, slide
from tests.lightning_plugin.test_identical_tiles import counted
from tests.lightning_plugin.test_store import lower, written

# Tensors that are background in part


def padded() -> Tensor:
    """Images of different sizes, padded to one."""
    batch = torch.full((2, 3, 128, 160), VALUE, dtype=torch.float64)
    for image, (height, width) in zip(batch, [(40, 50), (128, 30)], strict=True):
        image[:, :height, :width] = torch.randn(3, height, width, dtype=torch.float64)
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_padding_of_a_batch_is_computed_once(requires_grad: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Skips(2, True, 1)).double()
    batch = padded()
    theirs, ours = batch.clone().requires_grad_(requires_grad), batch.clone().requires_grad_(requires_grad)
    tiled = TiledModule(copy.deepcopy(plain), tiles=(8, 8, 2))
    count = counted(tiled)
    sum(o.square().sum() for o in plain(theirs)).backward()
    sum(o.square().sum() for o in tiled(LazyImage.from_tensor(ours))).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(tiled.parameters(), plain.parameters(), strict=True)]
    for mine, expected in [*pairs, (ours.grad, theirs.grad)] if requires_grad else pairs:
        assert mine is not None and expected is not None
        assert (mine - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert count.saved > 0.25 * count.tiles


class Bag(nn.Module):
    """Gated attention over the patches of a bag, which share statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh()
        )  # fmt: skip
        self.gate = nn.Linear(4, 1, bias=False)

    def forward(self, bag: Tensor) -> Tensor:
        features = self.body(bag).mean((2, 3))
        return (self.gate(features).softmax(0) * features).sum(0)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_patches_of_a_bag_are_computed_once(joined: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = Bag().double()
    bag = torch.full((10, 3, 32, 32), VALUE, dtype=torch.float64)
    bag[:4] = torch.randn(4, 3, 32, 32)
    tiled = TiledModule(copy.deepcopy(plain).to(dtype), tiles=(1, 1, 10))
    count = counted(tiled)
    plain(bag).square().sum().backward()
    if joined:  # patches of several sources, of which some are all background
        sides = [
            Background(p[None].to(dtype), Box.whole((32, 32) if i < 4 else (0, 0)), VALUE) for i, p in enumerate(bag)
        ]
        image = LazyImage(together(sides))
    else:
        image = LazyImage.from_tensor(bag.to(dtype))
    tiled(image).square().sum().backward()
    largest = max(p.grad.abs().max() for p in plain.parameters())  # type: ignore[union-attr]
    for mine, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        worst = (mine.grad - theirs.grad).abs().max() / max(1e-3 * largest, theirs.grad.abs().max())
        assert worst < (TOLERANCE if dtype == torch.float64 else 1e-3)
    assert count.saved >= 5, (count.saved, count.tiles)


def test_a_tensor_that_was_written_to_is_looked_at_again() -> None:
    torch.manual_seed(0)
    net, x = nn.Conv2d(3, 4, 3, padding=1).double(), padded()[:1]
    image, tiled = LazyImage.from_tensor(x), TiledModule(net, tiles=(16, 20))
    for _ in range(2):
        assert torch.allclose(materialize(tiled(image)), net(x), atol=1e-12)
        x[..., 60:, 60:].normal_()


def test_a_tensor_that_does_not_say_when_it_is_written_to_is_not_looked_at() -> None:
    with torch.inference_mode():
        x = padded()[:1].clone()
    net = nn.Conv2d(3, 4, 3, padding=1).double().requires_grad_(False)
    image, tiled = LazyImage.from_tensor(x), TiledModule(net, tiles=(16, 20))
    with torch.inference_mode():
        for _ in range(2):
            assert torch.allclose(materialize(tiled(image)), net(x), atol=1e-12)
            x[..., 60:, 60:].normal_()


def test_zeros_of_two_signs_are_two_values() -> None:
    x = torch.zeros(1, 1, 64, 64)
    x[..., :32, :32].normal_()
    x[..., 33:, 1::2] = -0.0
    x[..., 32:, :32] = -0.0
    out = materialize(TiledModule(Inverse(), tiles=(8, 8))(LazyImage.from_tensor(x)))
    assert torch.equal(out, 1 / x)


class Inverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


def test_tissue_and_blank_examples_are_not_taken_for_background() -> None:
    def known(*tensors: Tensor) -> list[Constants | None]:
        return background_of(Image.of(TensorSource(t), t.device) for t in tensors)

    blank, gate = torch.zeros(2, 3, 320, 384), torch.ones(1, 1, 32, 32)
    assert known(torch.randn(blank.shape)) == known(blank) == known(blank.to("meta")) == [None]
    assert known(blank, gate) == [None, None]
    blank[0, :, :160] = torch.randn(3, 160, 384)
    found, all_of_it = known(blank, gate)
    assert found is not None and found.cells.shape == (10, 12, 2)
    assert all_of_it is not None and all_of_it.is_constant
    assert (found.cells[..., 1] > 0).all() and (found.cells[:5, :, 0] <= 0).all() and (found.cells[5:, :, 0] > 0).all()


class KeepsFirst(Engine):
    """Tiles that are planned to be shared, but for the first segment, which is kept."""

    def choose(self, recording: Recording) -> Plan:
        plan, nodes = super().choose(recording), recording.nodes
        first, *others = plan.segments
        whole = (i for i in range(first.targets[0] + 1) if isinstance(nodes[i].op, TileOp))
        first = replace(first, targets=tuple(whole), keep=True, alike=False)
        return replace(plan, segments=(first, *(replace(s, alike=True) for s in others)))


def test_what_a_kept_segment_has_made_is_looked_at() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3)
    ).double()  # fmt: skip
    source = slide((128, 128), Box((0, 0), (24, 24)))
    tiled = TiledModule(copy.deepcopy(plain))
    tiled.engine = KeepsFirst(Planner(Options(tiles=(8, 8))))
    count = counted(tiled)
    plain(source.tensor).square().mean((2, 3)).sum().backward()
    tiled(LazyImage(source)).square().mean((2, 3)).sum().backward()
    for mine, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert (mine.grad - theirs.grad).abs().max() < TOLERANCE * theirs.grad.abs().max()
    assert tiled.plan is not None and tiled.plan.segments[0].keep
    assert count.saved > 0.3 * count.tiles, (count.saved, count.tiles)


def test_an_image_of_which_nothing_is_known_makes_tiles_different() -> None:
    """Also in a plan: two images, of which one knows its background."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x = self.one(x)
            return x.mean((2, 3)), (x * self.other(y)).mean((2, 3))

    knows, unknown = slide((256, 256), Box((0, 0), (32, 32))), slide((256, 256), Box.whole((256, 256)))
    tiled = TiledModule(Two().double())
    seen: list[float] = []

    class Seeing(Engine):
        def choose(self, recording: Recording) -> Plan:
            network = Network(recording)
            for out in (0, 1):
                node = [n for n in network.order if isinstance(n.op, ReduceOp)][out]
                program = Program.build([Target(node)], lambda v: False)
                seen.append(network.background.distinct(program, Grid((8, 8))))
            return super().choose(recording)

    tiled.engine = Seeing(Planner(Options(tiles=(8, 8))))
    first, second = tiled(LazyImage(knows), LazyImage(unknown))
    (materialize(first).sum() + materialize(second).sum()).backward()
    assert seen[0] < 0.3 and seen[1] == 1


# What is stored


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_background_is_stored_once_on_the_disk(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 5)).double()
    tissue = Box((0, 0), (32, 32))
    sizes = {}
    for known in (tissue, Box.whole((256, 256))):
        source = slide((256, 256), tissue)
        source.tissue = known
        tiled = TiledModule(net)
        tiled.engine = lower("disk", ahead, (32, 32), (32, 32))
        bytes_written = written(monkeypatch)
        with torch.no_grad():
            out = materialize(tiled(LazyImage(source)))
        assert torch.allclose(out, net(source.tensor), atol=1e-12)
        sizes[known.hi[0]] = sum(bytes_written)
    assert 0 < sizes[32] < 0.1 * sizes[256], sizes


@given(
    extent=st.tuples(st.integers(4, 9), st.integers(2, 9)), counts=st.tuples(st.integers(2, 4), st.integers(1, 4)),
    seed=st.integers(0, 999), ahead=st.booleans(), tier=st.sampled_from(["disk", "host", "device"]),
)  # fmt: skip
def test_tiles_for_which_another_stands_are_read_from_it(
    extent: tuple[int, int], counts: tuple[int, int], seed: int, ahead: bool, tier: str
) -> None:
    torch.manual_seed(seed)
    layout = Layout.channels_first((1, 2, *extent))
    grid = Grid(counts)
    boxes = [box for (box,) in grid.partition([extent]) if not box.empty]
    numbered = TileNumbers.empty(grid.ends([extent])[0])
    boundary = Boundary(layout, torch.float32, torch.device("cpu"), Home(tier, TransferQueue(ahead)), numbered=numbered)
    whole = torch.zeros(layout.shape)
    left = list(boxes)
    while left:
        alike = [b for b in left if b.extent == left[0].extent and torch.rand(()) < 0.6] or left[:1]
        tile = torch.randn(layout.tile_shape(alike[0]))
        boundary.write(alike, tile, ahead)
        numbered.assign(alike, len(left))
        for b in alike:
            layout.write_into(whole, boundary.whole, tile, b)
            left.remove(b)
    boundary.wait()
    for box in (boundary.whole, *(random_box(extent) for _ in range(4))):
        if ahead:
            boundary.prefetch(box)
        assert torch.equal(boundary.read(box), layout.narrow(whole, boundary.whole, box))
        boundary.wait()
