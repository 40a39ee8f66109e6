"""Pixels are handed on in the order in which decoders make them, and are those that other readers see."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import zarr
from numpy.typing import NDArray
from torch import nn

from lightning_plugin import Box, LazyImage, TiledModule
from wsi_trainer.slide.augment import Augmentation, Augmented, Augmenter, StainShift
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Bag, Image

Pixels = NDArray[np.uint8]


@pytest.fixture(params=["slide", "store"])
def known(request: pytest.FixtureRequest) -> tuple[Path, torch.memory_format, torch.Tensor]:
    """A slide or a store, the order of what its decoder makes, and all its pixels as another reader sees them."""
    path: Path = request.getfixturevalue(request.param)
    if request.param == "slide":
        pixels = tifffile.imread(path, key=0)
    else:
        pixels = np.moveaxis(zarr.open_array(path / "0", mode="r")[:], 0, 2)
    order = torch.contiguous_format if request.param == "store" else torch.channels_last
    return path, order, torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]


def boxes(count: int, extent: tuple[int, ...]) -> list[Box]:
    rng = np.random.default_rng(7)
    lows = [tuple(int(rng.integers(end)) for end in extent) for _ in range(count)]
    return [Box(lo, tuple(int(rng.integers(a, end)) + 1 for a, end in zip(lo, extent))) for lo in lows]


def lies_as_said(tile: torch.Tensor, order: torch.memory_format) -> bool:
    """Whether a tile has the very strides that PyTorch gives a tensor of this order."""
    return tile.stride() == torch.empty(tile.shape, memory_format=order).stride()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache", [0, 1 << 28])
def test_boxes_lie_as_the_decoder_made_them(
    known: tuple[Path, torch.memory_format, torch.Tensor], cache: int, threads: int
) -> None:
    path, order, pixels = known
    source = Image(Slide.open(path), cache=cache, threads=threads)
    assert source.memory_format == order and source.dtype == torch.uint8
    assert source.shape == (1, 3, 1037, 803) and source.mpp == pytest.approx((0.5, 0.5))
    for box in boxes(30, (1037, 803)):
        source.prefetch([box])
        tile = source.read(box)
        assert torch.equal(tile, pixels[:, :, box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]])
        assert lies_as_said(tile, order), box
        value = source.constant(box)
        assert value is None or (tile == value[None, :, None, None]).all()


@pytest.mark.parametrize("flips", [(False, False, True), (True, False, False), (True, True, True)])
def test_augmented_boxes_lie_alike(
    known: tuple[Path, torch.memory_format, torch.Tensor], flips: tuple[bool, bool, bool]
) -> None:
    path, order, pixels = known
    stain = StainShift((1.1, 0.9, 1.0), (0.02, 0.0, -0.01))
    source = Augmented(Image(Slide.open(path)), Augmentation(*flips, (300, -40), stain))
    whole = torch.full_like(pixels, 255)
    whole[:, :, 300:, :-40] = pixels[:, :, :-300, 40:]
    whole = stain.apply(whole.contiguous()).flip([d for d, flip in ((2, flips[0]), (3, flips[1])) if flip])
    whole = whole.transpose(2, 3) if flips[2] else whole
    for box in [*boxes(20, tuple(source.shape[2:])), Box((0, 0), (200, 100))]:  # the last one may be glass alone
        tile = source.read(box)
        assert torch.equal(tile, whole[:, :, box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]])
        assert tile.is_contiguous(memory_format=order), box


def test_patches_lie_alike(known: tuple[Path, torch.memory_format, torch.Tensor]) -> None:
    path, order, pixels = known
    corners = np.array([[0, 0], [500, 301], [900, 700], [31, 64], [64, 64]], np.int32)
    bag = Bag(Slide.open(path), corners, 96)
    expected = torch.cat([pixels[:, :, y : y + 96, x : x + 96] for y, x in corners.tolist()])
    for box in boxes(20, (5, 96, 96)):
        (n, y, x), (last, bottom, right) = box.lo, box.hi
        tile = bag.read(box)
        assert torch.equal(tile, expected[n:last, :, y:bottom, x:right])
        assert lies_as_said(tile, order), box
    each = Augmenter(seed=3, turn=True).draw_patches("slide", 0, 5)
    shown = Augmented(bag, Augmentation(transpose=True), each)
    read = shown.read(Box((0, 0, 0), (5, 96, 96)))
    assert lies_as_said(read, order)
    assert each.turns is not None
    for patch, one, (flip_y, flip_x, turn) in zip(read, expected, each.turns.tolist()):
        one = one.flip([d for d, flip in ((1, flip_y), (2, flip_x)) if flip])
        one = one.transpose(1, 2) if turn else one
        assert torch.equal(patch, one.transpose(1, 2))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 6, 5, 2, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(6, 8, 3), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
        )  # fmt: skip
        self.double()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.network((image.double() / 255 - 0.6) / 0.2)
        return out


def test_a_step_is_that_of_plain_pixels(known: tuple[Path, torch.memory_format, torch.Tensor]) -> None:
    """Tiles in the decoder's order give the loss, the gradients and the statistics of the image in plain order."""
    path, _, pixels = known
    torch.manual_seed(0)
    plain = Scaled()
    tiled = copy.deepcopy(plain)
    plain(pixels.contiguous()).square().sum().backward()
    run = TiledModule(tiled, budget="24MiB")
    run(LazyImage(Image(Slide.open(path)))).square().sum().backward()
    assert run.plan is not None and run.plan.segments[0].forward.tiles > 1
    assert run.peak_bytes <= 24 << 20
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    pairs = list(zip(plain.parameters(), tiled.parameters()))
    for expected, actual in [(e.grad, a.grad) for e, a in pairs] + list(zip(plain.buffers(), tiled.buffers())):
        assert expected is not None and actual is not None
        scale = max(expected.abs().max().item(), 1e-3 * largest)
        assert (actual - expected).abs().max().item() / scale < 1e-9
