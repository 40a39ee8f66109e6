"""Max unpooling, windows laid out as columns, and the padding of average pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from tests.exactness import asked, assert_exact
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds

GRIDS = [((3, 2), (2, 3)), ((5, 7), (1, 1))]


def unpooled(x: Tensor, kernel: int, stride: int, padding: int = 0) -> Tensor:
    """As in SegNet: what lies between the pooling and the unpooling changes the values."""
    small, where = F.max_pool2d(x, kernel, stride, padding, return_indices=True)
    return F.max_unpool2d(small.tanh() * 2, where, kernel, stride, padding, output_size=x.shape[2:])


@pytest.mark.parametrize("tiles,backward", GRIDS)
@pytest.mark.parametrize("kernel,stride,padding", [(2, 2, 0), (3, 3, 1), (2, 3, 0), (1, 2, 0)])
def test_unpool(kernel: int, stride: int, padding: int, tiles: Any, backward: Any) -> None:
    assert_tiled(
        After(lambda x: unpooled(x, kernel, stride, padding)), (2, 3, 11, 7), tiles=tiles, backward_tiles=backward
    )


def test_unpool_3d() -> None:
    def function(x: Tensor) -> Tensor:
        small, where = F.max_pool3d(x, 2, return_indices=True)
        return F.max_unpool3d(small, where, 2, output_size=x.shape[2:])

    assert_tiled(After(function, axes=3), (1, 3, 6, 5, 4), tiles=(2, 3, 2), backward_tiles=(3, 1, 2))


def test_unpool_to_another_size_is_exact() -> None:
    """Indices count the positions of the map that was pooled; to another size they mean other positions."""

    def function(x: Tensor) -> Tensor:
        small, where = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(small, where, 2, output_size=(7, 9))

    net = After(function)
    assert_exact(net, (2, 3, 6, 8))
    assert recorded_kinds(net, (2, 3, 6, 8))["Barrier"]


def local_attention(x: Tensor) -> Tensor:
    """Every position weighs its neighbours by its own softmax."""
    n, c, h, w = x.shape
    columns = F.unfold(x, 3, padding=1).view(n, c, 9, h * w)
    return (columns * columns.mean(1, keepdim=True).softmax(2)).sum(2).view(n, c, h, w)


@pytest.mark.parametrize("tiles,backward", GRIDS)
def test_columns(tiles: Any, backward: Any) -> None:
    how = {"tiles": tiles, "backward_tiles": backward}
    columns = After(lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=(2, 1), stride=(2, 1)))
    for images in (1, 2):
        assert_tiled(columns, (images, 3, 9, 7), **how)
        assert_tiled(After(local_attention), (images, 3, 9, 7), **how)
        assert_tiled(After(lambda x, w: w @ F.unfold(x, 3), w=(5, 36)), (images, 3, 9, 7), **how)


@pytest.mark.parametrize("tiles,backward", GRIDS)
def test_unfold(tiles: Any, backward: Any) -> None:
    how = {"tiles": tiles, "backward_tiles": backward}
    assert_tiled(After(lambda x: x.unfold(2, 3, 2).amax(-1)), (2, 3, 9, 7), **how)
    assert_tiled(After(lambda x: x.unfold(2, 4, 4).unfold(3, 2, 1).mean((-1, -2))), (2, 3, 9, 7), **how)


def test_segnet() -> None:
    class SegNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(3, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)
            self.up = nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.down(x)).relu()
            small, where = F.max_pool2d(x, 2, return_indices=True)
            return self.up(F.max_unpool2d(small, where, 2, output_size=x.shape[2:]))

    assert_tiled(SegNet(), (2, 3, 11, 9))


@pytest.mark.parametrize("shape", [(2, 3, 13), (2, 3, 13, 1), (2, 3, 1, 13)])
def test_pooling_beside_a_dimension_of_one_position(shape: tuple[int, ...]) -> None:
    """As a 1-D pooling is run, and of maps that are one position wide."""
    kernel = [1 if size == 1 else 3 for size in shape[2:]]
    largest = getattr(F, f"max_pool{len(kernel)}d")
    mean = getattr(F, f"avg_pool{len(kernel)}d")
    padding = [size // 2 for size in kernel]

    def pooled(x: Tensor) -> Tensor:
        wide = mean(x, kernel, 1, padding, count_include_pad=False)
        return mean(largest(wide, kernel, [1] * len(kernel), padding), kernel)

    assert_tiled(After(pooled, axes=len(kernel)), shape, tiles=(3, 3)[: len(kernel)])
    x = torch.randn(shape)
    lazy = LazyImage.from_tensor(x, engine=asked((3, 3)[: len(kernel)], (2, 2)[: len(kernel)]))
    found, where = largest(lazy, kernel, return_indices=True)[1], largest(x, kernel, return_indices=True)[1]
    assert torch.equal(materialize(found), where)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 3), (2, 1)])
@pytest.mark.parametrize("counted", [True, False])
def test_padding_of_a_map_of_one_position(kernel: int, stride: int, counted: bool) -> None:
    """The pooled dimension is no axis then, and padding counts there as on axes."""
    x, weight = torch.randn(1, 2, 5, dtype=torch.float64), torch.randn(3, 2, 5, dtype=torch.float64)

    def pooled(x: Tensor) -> Tensor:
        return F.avg_pool1d(F.conv1d(x, weight), kernel, stride, 1, count_include_pad=counted)

    found = materialize(pooled(LazyImage.from_tensor(x, engine=asked(tiles=(2,)))))
    assert (found - pooled(x)).abs().max() < 1e-12
