"""A class for each pixel: losses by hand, and tile by tile what plain PyTorch computes."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lightning_plugin import LazyImage, TensorSource, TiledModule, materialize
from wsi_trainer.errors import UserError
from wsi_trainer.models import ResNet, SegmentationBackbone, SegmentationTask, SlideSegmenter, UNet
from wsi_trainer.models.backbones import make_backbone
from wsi_trainer.regions.target import IGNORED

MiB = 2**20
CLASSES = ["normal", "tumour", "fat"]


def drawn(height: int, width: int, seed: int = 0, ignored: float = 0.2) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 3, (1, 1, height, width), generator=random)
    off = torch.rand((1, 1, height, width), generator=random) < ignored
    return torch.where(off, IGNORED, target).to(torch.uint8)


def logits_of(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 1000), st.lists(st.floats(0.1, 5), min_size=3, max_size=3))
def test_cross_entropy_is_pytorchs(seed: int, weights: list[float]) -> None:
    logits, target = logits_of(5, 7, seed), drawn(5, 7, seed)
    task = SegmentationTask(CLASSES, losses={"cross_entropy": 1}, class_weights=weights)
    weight = torch.tensor(weights).double()
    expected = functional.cross_entropy(logits, target[:, 0].long(), weight=weight, ignore_index=IGNORED)
    torch.testing.assert_close(task.loss(logits, target), expected)
    same = SegmentationTask(CLASSES, losses={"focal": 1}, class_weights=weights, focus=0)
    torch.testing.assert_close(same.loss(logits, target), expected)


def test_dice_and_focal_by_hand() -> None:
    logits, target = logits_of(6, 5), drawn(6, 5)
    said = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(axis=1, keepdims=True)
    total, focal, counted = 0.0, 0.0, 0
    for place in range(3):
        both = predicted = true = 0.0
        for y in range(6):
            for x in range(5):
                if target[0, 0, y, x] != IGNORED:
                    predicted += said[0, place, y, x]
                    if target[0, 0, y, x] == place:
                        true, both = true + 1, both + said[0, place, y, x]
                        counted += 1
                        focal -= (1 - said[0, place, y, x]) ** 2 * np.log(said[0, place, y, x])
        total += (2 * both + 1) / (predicted + true + 1)
    assert SegmentationTask(CLASSES, losses={"dice": 1}).loss(logits, target).item() == pytest.approx(1 - total / 3)
    assert SegmentationTask(CLASSES, losses={"focal": 2}).loss(logits, target).item() == pytest.approx(
        2 * focal / counted
    )


def test_a_slide_that_says_nothing_has_no_loss_and_no_gradient() -> None:
    logits = logits_of(4, 4).requires_grad_()
    target = torch.full((1, 1, 4, 4), IGNORED, dtype=torch.uint8)
    loss = SegmentationTask(CLASSES, losses={"cross_entropy": 1, "dice": 1, "focal": 1}).loss(logits, target)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


class Step(nn.Module):
    """Loss, areas and shares of a slide."""

    def __init__(self, model: SlideSegmenter) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        task = self.model.task
        assert isinstance(task, SegmentationTask)
        logits = self.model(image)
        return task.loss(logits, target), task.areas(logits, target), task.predict(logits)


NETWORKS = {
    "u-net": (lambda: UNet((4, 6)), 8 * MiB),
    "deeper u-net": (lambda: UNet((4, 6, 8)), 8 * MiB),
    "u-net with statistics": (lambda: UNet((4, 6), norm="batch"), 8 * MiB),
    "an encoder with a stride": (lambda: ResNet((4, 8), norm="weight"), 4 * MiB),
}
"""Each with a budget that plain PyTorch exceeds."""


SLOW = ("deeper u-net", "u-net with statistics", "an encoder with a stride")
"""Planning takes up to half a minute for each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in NETWORKS])
def test_tile_by_tile_is_plain_pytorch(name: str) -> None:
    torch.manual_seed(0)
    losses = {"cross_entropy": 1.0, "dice": 0.7, "focal": 0.3}
    task = SegmentationTask(CLASSES, losses=losses, class_weights=[1, 5, 2])
    make, budget = NETWORKS[name]
    plain = Step(SlideSegmenter(backbone=make(), task=task).double())
    inner = copy.deepcopy(plain)
    tiled = TiledModule(inner, budget=budget, halo="recompute")  # fewer plans to look at
    image = torch.randint(0, 256, (1, 3, 203, 150), dtype=torch.uint8)
    target = drawn(203, 150)
    loss, areas, shares = plain(image, target)
    loss.backward()
    lazy, found, predicted = tiled(LazyImage(TensorSource(image)), LazyImage(TensorSource(target)))
    cut = materialize(lazy)
    cut.backward()
    assert "barrier" not in str(tiled.plan) and tiled.peak_bytes <= budget
    assert tiled.plan is not None and tiled.plan.plain_bytes > 1.3 * budget
    torch.testing.assert_close(cut, loss, rtol=0, atol=1e-10)
    assert torch.equal(materialize(found), areas)
    torch.testing.assert_close(materialize(predicted), shares)
    for mine, its in zip(plain.parameters(), inner.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(its.grad, mine.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (61, 50), (7, 9)])
def test_logits_have_the_size_of_the_slide(height: int, width: int) -> None:
    task = SegmentationTask(CLASSES)
    for backbone in (UNet((4, 6, 8)), ResNet((4, 8))):
        model = SlideSegmenter(backbone=backbone, task=task)
        assert model(torch.zeros(1, 3, height, width, dtype=torch.uint8)).shape == (1, 3, height, width)


def test_enlarged_logits_lie_where_the_positions_are() -> None:
    """A network that answers to one dark square is strongest there, also with a stride that cuts the side."""
    task = SegmentationTask(["normal", "dark"])

    class Darkness(nn.Module):
        out_channels, stride = 1, 4

        def forward(self, x: Tensor) -> Tensor:
            return -functional.avg_pool2d(x.mean(1, keepdim=True), 4)

    model = SlideSegmenter(backbone=Darkness(), task=task)
    model.classifier.weight.data = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1)  # type: ignore[union-attr, operator]
    image = torch.full((1, 3, 101, 90), 255, dtype=torch.uint8)
    image[:, :, 40:60, 20:44] = 0
    logits = model(image)[0, 1]
    y, x = torch.where(logits >= logits.max() - 1e-4)
    assert 39 < y.float().mean() < 60 and abs(float(y.float().mean()) - 49.5) < 0.6
    assert abs(float(x.float().mean()) - 31.5) < 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": ["a"]}, "at least two"),
        ({"classes": ["a", "b"], "drawn": {"x": "c"}}, "none of a, b and ignore"),
        ({"classes": ["a", "b"], "unmarked": "c"}, "none of a, b and ignore"),
        ({"classes": ["a", "b"], "losses": {"lovasz": 1}}, "the terms are cross_entropy, dice, focal"),
        ({"classes": ["a", "b"], "losses": {"dice": 0}}, "no term"),
        ({"classes": ["a", "b"], "losses": {"dice": float("nan")}}, "0 or positive"),
        ({"classes": ["a", "b"], "focus": -1}, "focus is -1"),
        ({"classes": ["a", "b"], "class_weights": [1, 2, 3]}, "3 numbers for 2 classes"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_task(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentationTask(**arguments)


def test_what_pools_is_refused() -> None:
    from wsi_trainer.models import MaxPooling

    for key, value in (("head", MaxPooling), ("magnifications", 2), ("pool_over", "tissue")):
        with pytest.raises(ValueError, match=f"model.{key}"):
            SlideSegmenter(backbone=UNet((4,)), task=SegmentationTask(CLASSES), **{key: value})


# -- networks for a class of each pixel: the own U-Net, and decoders of segmentation-models-pytorch


needs_smp = pytest.mark.skipif(find_spec("segmentation_models_pytorch") is None, reason="it is not installed")
DECODERS = [
    pytest.param(lambda: UNet((4, 6, 8)), id="own"),
    pytest.param(lambda: SegmentationBackbone("unet", "tu-resnet10t"), id="unet", marks=[needs_smp, pytest.mark.full]),
    pytest.param(lambda: SegmentationBackbone("fpn", "tu-convnext_atto"), id="fpn", marks=needs_smp),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", DECODERS)
def test_a_decoder_in_tiles_is_plain_pytorch(make: type[nn.Module]) -> None:
    """On a slide whose sides the strides do not divide."""
    torch.manual_seed(0)
    task = SegmentationTask(["a", "b"])
    plain = SlideSegmenter(backbone=make(), task=task).double().eval()
    network = copy.deepcopy(plain)
    image = torch.randint(0, 256, (1, 3, 91, 75), dtype=torch.uint8)
    target = torch.randint(0, 2, (1, 1, 91, 75), dtype=torch.uint8)
    expected = task.loss(plain(image), target)
    expected.backward()
    tiled = TiledModule(network, tiles=(3, 2))
    actual = materialize(task.loss(tiled(LazyImage.from_tensor(image)), LazyImage.from_tensor(target)))
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for mine, its in zip(plain.parameters(), network.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(its.grad, mine.grad, rtol=0, atol=1e-9)


@needs_smp
def test_a_decoder_by_its_name() -> None:
    network = make_backbone("smp:fpn:tu-resnet10t")
    assert isinstance(network, SegmentationBackbone) and network.stride == 4 and network.out_channels == 128
    assert network.eval()(torch.rand(1, 3, 61, 83)).shape == (1, 128, 16, 21)
    with pytest.raises(UserError, match=r"makes no nonsense over tu-resnet10t.*smp:ARCHITECTURE:ENCODER"):
        make_backbone("smp:nonsense:tu-resnet10t")
    with pytest.raises(UserError, match="smp:ARCHITECTURE:ENCODER"):
        make_backbone("smp:unet:tu-resnet7")
