"""Sources that count images: each tile reads the images that it is about, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import Box, LazyImage, TiledModule, TileSource
from lightning_plugin.source import BatchSource, TensorSource, likely_instances
from tests.exactness import TOLERANCE, difference


@dataclass(eq=False)
class Noted(TileSource):
    """Images in memory; what was asked for is noted."""

    tensor: Tensor
    asked: list[Box] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


@dataclass(eq=False)
class Patches(Noted):
    """Patches that are read by number."""

    instances: int = 1

    def read(self, box: Box) -> Tensor:
        assert box.ndim == self.tensor.dim() - 1
        self.asked.append(box)
        parts = [slice(lo, hi) for lo, hi in box.intervals()]
        return self.tensor[(*parts[: self.instances], slice(None), *parts[self.instances :])]

    def constant(self, box: Box) -> Tensor | None:
        assert box.ndim == self.tensor.dim() - 1
        return None


@dataclass(eq=False)
class Whole(Noted):
    """A batch whose source knows of space alone."""

    def read(self, box: Box) -> Tensor:
        assert box.ndim == 2
        self.asked.append(box)
        return self.tensor[:, :, box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]]

    def constant(self, box: Box) -> Tensor | None:
        assert box.ndim == 2
        return None


class Mean(nn.Module):
    """Images, or bags of them, encoded one by one; the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(0, -4)).mean((0, 2))  # type: ignore[no-any-return]


def compare(source: object, image: Tensor, tiles: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain, net = Mean().double(), Mean().double()
    net.load_state_dict(plain.state_dict())
    weight = torch.arange(1.0, 5.0, dtype=torch.float64)
    (plain(image) * weight).sum().backward()
    (TiledModule(net, tiles=tiles)(LazyImage(source)) * weight).sum().backward()  # type: ignore[arg-type]
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert difference(q.grad, p.grad, 1e-3) < TOLERANCE


@pytest.mark.parametrize("count", [1, 7])
def test_a_bag_is_read_patch_by_patch(count: int) -> None:
    image = torch.randn(count, 3, 9, 8, dtype=torch.float64)
    source = Patches(image)
    compare(source, image, (1, 1, count))
    assert source.asked and all(box.hi[0] - box.lo[0] == 1 for box in source.asked)


def test_a_batch_of_bags_is_read_bag_by_bag() -> None:
    image = torch.randn(2, 5, 3, 9, 8, dtype=torch.float64)
    source = Patches(image, instances=2)
    compare(source, image, (1, 1, 2, 5))
    assert all(box.extent[:2] == (1, 1) for box in source.asked)


def test_a_source_that_knows_of_space_alone_is_read_whole_and_cut() -> None:
    image = torch.randn(3, 3, 9, 8, dtype=torch.float64)
    source = Whole(image)
    compare(source, image, (2, 1, 3))
    assert source.asked


def test_images_side_by_side_are_read_apart() -> None:
    image = torch.randn(4, 3, 9, 8, dtype=torch.float64)
    one, two = Whole(image[:1]), Patches(image[1:])
    compare(BatchSource((one, two)), image, (1, 1, 4))
    assert two.asked and all(box.hi[0] - box.lo[0] == 1 for box in two.asked)
    batch = BatchSource((TensorSource(image[:1]), TensorSource(image[1:])))
    assert torch.equal(batch.read(Box((0, 2, 1), (3, 5, 4))), image[0:3, :, 2:5, 1:4])


def test_bags_are_told_from_volumes_by_their_channels() -> None:
    assert likely_instances((2, 7, 3, 64, 64)) == 2
    assert likely_instances((2, 3, 40, 64, 64)) == 1
    assert likely_instances((2, 3, 64, 64)) == 1
    assert likely_instances((1, 1, 3, 64, 64)) == 1
