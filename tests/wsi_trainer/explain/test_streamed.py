"""Maps made tile by tile are those that plain PyTorch makes, and no slide is held."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_plugin import Box, LazyImage, TileSource
from wsi_trainer.explain.attribution import METHODS, Method, attribute
from wsi_trainer.models import (
    VGG,
    AttentionPooling,
    ClassAttentionPooling,
    MaxPooling,
    MultiClassTask,
    OrdinalTask,
    ResNet,
    SlideClassifier,
)

MiB = 2**20


class Watched(TileSource):
    """A slide in memory that notes the largest box that was read."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels.numpy()  # the memory of the slide is not the step's
        self.shape, self.dtype = tuple(pixels.shape), pixels.dtype
        self.largest = 0

    def read(self, box: Box) -> Tensor:
        (top, left), (bottom, right) = box.lo, box.hi
        self.largest = max(self.largest, (bottom - top) * (right - left))
        return torch.from_numpy(self.pixels[..., top:bottom, left:right].copy())

    def constant(self, box: Box) -> Tensor | None:
        return None


def slide(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (1, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def classes() -> MultiClassTask:
    return MultiClassTask(["a", "b", "c"])


MODELS: dict[str, Callable[[], SlideClassifier]] = {
    "attention": lambda: SlideClassifier(backbone=VGG((4, 8)), head=AttentionPooling),
    "attention by class": lambda: SlideClassifier(backbone=VGG((4, 8)), head=ClassAttentionPooling, task=classes()),
    "maximum": lambda: SlideClassifier(backbone=ResNet((4, 8), norm="batch"), head=MaxPooling),
    "an order": lambda: SlideClassifier(backbone=VGG((4, 8)), head=AttentionPooling, task=OrdinalTask(["0", "1", "2"])),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_tile_by_tile_is_plain_pytorch(name: str, method: Method) -> None:
    if method == "attention" and name == "maximum":
        pytest.skip("a maximum has no attention")
    torch.manual_seed(0)
    model = MODELS[name]().double()
    pixels = slide(150, 203)
    plain = attribute(model, pixels, method=method, steps=3).values
    source = Watched(pixels)
    tiled = attribute(model, LazyImage(source), method=method, steps=3, budget=12 * MiB)
    assert tiled.values.shape == plain.shape and plain.abs().max() > 0
    assert (tiled.values - plain).abs().max() / plain.abs().max() < 1e-9
    assert 0 < tiled.peak_bytes <= 12 * MiB


def test_several_magnifications_and_tissue_are_explained_too() -> None:
    torch.manual_seed(0)
    model = SlideClassifier(
        backbone=VGG((8,), convs=1), magnifications=2, share_backbone=True, pool_over="tissue"
    ).double()
    pixels, coarse = slide(96, 128), slide(48, 64, seed=1)
    counts = [(torch.rand(1, 1, h // 2, w // 2) > 0.3).to(torch.uint8) for h, w in ((96, 128), (48, 64))]
    lazy = [LazyImage(Watched(one)) for one in (pixels, coarse, *counts)]
    methods: tuple[Method, ...] = ("activation", "gradient")
    for method in methods:
        plain = attribute(model, pixels, method=method, context=[coarse], tissue=counts).values
        tiled = attribute(model, lazy[0], method=method, context=[lazy[1]], tissue=lazy[2:], budget=64 * MiB).values
        assert (tiled - plain).abs().max() / plain.abs().max() < 1e-9
        if method != "gradient":  # a pixel without tissue still reaches its neighbours
            assert (plain[counts[0][0, 0] == 0] == 0).all()


def test_integrated_gradients_add_up_to_the_difference_from_glass() -> None:
    torch.manual_seed(0)
    model = SlideClassifier(backbone=VGG((4, 8)), head=AttentionPooling).double().eval()
    pixels = slide(64, 48)
    with torch.no_grad():
        difference = model(pixels)[0, 0] - model(torch.full_like(pixels, 255))[0, 0]
    gaps = []
    for steps in (1, 64):
        total = attribute(model, pixels, method="integrated", steps=steps).values.sum()
        gaps.append(float((total - difference).abs() / difference.abs()))
    assert gaps[1] < 0.01 and gaps[1] < gaps[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["activation", "attention", "gradient"])
def test_a_slide_larger_than_the_budget_is_read_in_parts(method: Method) -> None:
    torch.manual_seed(0)
    model = SlideClassifier(backbone=VGG((4, 8), stem_stride=2), head=AttentionPooling)
    source = Watched(slide(2048, 1536))
    # In float32 the image alone takes 36 MiB, and so does what it is mixed to.
    made = attribute(model, LazyImage(source), method=method, steps=1, budget=24 * MiB)
    assert 0 < made.peak_bytes <= 24 * MiB
    assert source.largest < 2048 * 1536 / 4
    assert torch.isfinite(made.values).all() and made.values.shape[0] >= 2048 // model.stride - 1
