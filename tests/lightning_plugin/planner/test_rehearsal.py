"""What is rehearsed is what a step does."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, TileSource
from lightning_plugin.boxes import Box
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import Chooser
from lightning_plugin.planner.costs.lower import LowerTiers
from lightning_plugin.planner.costs.rates import RATES
from tests.zoo import ZOO


class Watching(nn.Module):
    """Takes a statistic of its pooled vector, without gradient, before anything else is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.last = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.layers(x).mean(dim=(2, 3))
        self.seen.copy_(pooled.detach().mean(dim=0))  # executes: a write into an ordinary tensor
        out: Tensor = self.last(pooled)
        return out


def test_a_statistic_that_is_read_first_does_not_hide_the_backward_pass() -> None:
    tiled = TiledModule(Watching(), budget="4MiB")
    out = tiled(LazyImage.from_tensor(torch.rand(1, 3, 128, 128)))
    assert tiled.plan is not None and all(s.forecast.backward_bytes > 0 for s in tiled.plan.segments)
    out.sum().backward()
    assert tiled.peak_bytes <= tiled.plan.peak_bytes <= 4 * 2**20


def test_a_map_that_is_returned_is_planned_with_a_whole_cotangent() -> None:
    """`sum` gives one number for all positions, which takes no room: the only loss for which a plan says too much."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.Conv2d(8, 16, 3, padding=1))
    over = {}
    for dense in (True, False):
        module.zero_grad(set_to_none=True)
        tiled = TiledModule(module, budget="64MiB")
        out = tiled(torch.randn(1, 3, 64, 64))
        out.backward(torch.randn_like(out)) if dense else out.sum().backward()
        assert tiled.plan is not None
        over[dense] = tiled.plan.peak_bytes - tiled.peak_bytes
    assert over[True] == 0 and 0 < over[False] <= out.nbytes


@dataclass
class Pixels(TileSource):
    """Reads boxes of a tensor into memory of their own."""

    image: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.image.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.image.dtype

    def read(self, box: Box) -> Tensor:
        rows, columns = box.intervals()
        return self.image[..., slice(*rows), slice(*columns)].clone()

    def constant(self, box: Box) -> Tensor | None:
        return None


@dataclass
class Announced(Pixels):
    """The same, and those that it is told of before they are asked for."""

    ahead: dict[Box, Tensor] = field(default_factory=dict)
    used: int = 0
    reads_ahead: ClassVar[bool] = True

    def prefetch(self, boxes: Iterable[Box]) -> None:
        for box in boxes:
            self.ahead[box] = super().read(box)

    def read(self, box: Box) -> Tensor:
        self.used += box in self.ahead
        return self.ahead.pop(box) if box in self.ahead else super().read(box)


def test_a_plan_has_room_for_the_pixels_that_a_source_reads_ahead() -> None:
    module = nn.Sequential(nn.Conv2d(16, 4, 3), nn.ReLU(True), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1))
    image = torch.rand(1, 16, 256, 240)
    peaks = {}
    for kind in (Pixels, Announced):
        module.zero_grad(set_to_none=True)
        source = kind(image)
        free = TiledModule(module, tiles=3)
        free(LazyImage(source)).sum().backward()
        peaks[kind] = free.peak_bytes
        budget = 2 * 2**20
        tiled = TiledModule(module, budget=budget)
        module.zero_grad(set_to_none=True)
        tiled(LazyImage(source)).sum().backward()
        assert tiled.plan is not None
        assert 0.99 * tiled.peak_bytes - 1024 <= tiled.plan.peak_bytes <= budget
        if isinstance(source, Announced):
            assert source.used > 0 and not source.ahead
    tile = 16 * 4 * (256 // 3) * (240 // 3)
    assert peaks[Announced] - peaks[Pixels] >= 0.9 * tile


class Both(Pixels):
    """Says nothing of its images, so that a box is read of all of them."""


class Either(Pixels):
    """The same, of the images that are asked for."""

    instances = 1

    def read(self, box: Box) -> Tensor:
        images, rows, columns = box.intervals()
        return self.image[slice(*images), :, slice(*rows), slice(*columns)].clone()


def test_a_plan_has_room_for_what_a_source_reads_of_other_images() -> None:
    """Tiles of one image hold what is read of all, where a source cannot say less."""
    module = nn.Sequential(nn.Conv2d(32, 2, 3), nn.ReLU(True), nn.Conv2d(2, 2, 3), nn.AdaptiveAvgPool2d(1))
    image, peaks = torch.rand(6, 32, 50, 45), {}
    for kind in (Both, Either):
        free = TiledModule(module, tiles=(1, 1, 6))
        module.zero_grad(set_to_none=True)
        free(LazyImage(kind(image))).sum().backward()
        peaks[kind] = free.peak_bytes
        tiled = TiledModule(module, budget=free.peak_bytes + 2**16)
        module.zero_grad(set_to_none=True)
        tiled(LazyImage(kind(image))).sum().backward()
        assert tiled.plan is not None
        assert 0.99 * tiled.peak_bytes - 1024 <= tiled.plan.peak_bytes <= free.peak_bytes + 2**16
    assert peaks[Both] - peaks[Either] >= 4 * 32 * 4 * 50 * 45


@pytest.mark.slow
def test_maps_on_the_disk_take_the_buffers_that_the_search_counts() -> None:
    """A bottleneck reads a narrow map and writes a wide one, both beside the work on other tiles."""
    with torch.device("meta"):
        net = ZOO["resnet50"].published()
    with recorded(net, (1, 3, 20480, 20480), torch.float32) as (network, _):
        chooser = Chooser(network, RATES["cuda:a100"], LowerTiers(64 << 30))
        plan = chooser.choose(11 << 30)
    assert any(s.ahead and s.tier == "disk" for s in plan.segments)
    assert len(chooser.rehearsed) == 1, "the first plan of the search keeps the budget"
