"""BatchNorm over tissue is BatchNorm over the pixels of tissue alone, plain and tile by tile."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from wsi_trainer.models import VGG, AveragePooling, ClassAttentionPooling, MultiClassTask, ResNet, SlideClassifier
from wsi_trainer.models.tissue_norm import TissueBatchNorm2d, over_tissue


class Reference(nn.BatchNorm2d):
    """BatchNorm's own statistics of the positions that count, taken out of the map as a list of positions."""

    counts: Tensor

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.movedim(1, 0)[:, self.counts.bool()[:, 0]]
        mean, biased = chosen.mean(1), chosen.var(1, correction=0)
        size = chosen.shape[1]
        self.num_batches_tracked += 1  # type: ignore[operator]
        for buffer, value in ((self.running_mean, mean), (self.running_var, biased * size / (size - 1))):
            assert buffer is not None
            buffer.mul_(0.9).add_(value.detach(), alpha=0.1)
        unit = (x - mean[:, None, None]) / (biased[:, None, None] + self.eps).sqrt()
        return unit * self.weight[:, None, None] + self.bias[:, None, None]


def classifier(**options: object) -> SlideClassifier:
    torch.manual_seed(0)
    made = {"backbone": ResNet((4, 6), blocks=1), "task": MultiClassTask("ab")} | options
    return SlideClassifier(batchnorm_over="tissue", **made).double()  # type: ignore[arg-type]


def slide(height: int, width: int, stride: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8, generator=generator)
    cells = torch.rand(1, 1, math.ceil(height / stride), math.ceil(width / stride), generator=generator)
    return image, (cells < 0.3).to(torch.uint8)


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    gradients = dict(one.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in gradients.values() if p.grad is not None)
    for name, p in other.named_parameters():
        expected = gradients[name].grad
        if not p.requires_grad:
            assert expected is None and p.grad is None, name
            continue
        assert expected is not None and p.grad is not None, name
        scale = max(float(expected.abs().max()), 1e-3 * largest)
        assert float((p.grad - expected).abs().max()) / scale < 1e-9, name
    buffers = dict(one.named_buffers())
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("size", [(96, 80), (97, 83)])
def test_the_statistics_are_those_of_the_tissue_at_every_stride(size: tuple[int, int]) -> None:
    ours = classifier(head=AveragePooling)
    plain = copy.deepcopy(ours)
    image, tissue = slide(*size, ours.stride)
    for path, module in list(plain.backbone.named_modules()):
        if isinstance(module, TissueBatchNorm2d):
            norm = Reference(module.running_mean.numel()).double()
            norm.load_state_dict(module.state_dict())
            parent, _, child = path.rpartition(".")
            setattr(plain.backbone.get_submodule(parent), child, norm)
            fine = tissue.repeat_interleave(module.factor, 2).repeat_interleave(module.factor, 3)
            rows, columns = (-(-side // (ours.stride // module.factor)) for side in size)
            norm.counts = fine[:, :, :rows, :columns]
    plain._cells = [None]
    expected, actual = plain(image), ours(image, tissue=[tissue])
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    target = torch.tensor([1])
    plain.task.loss(expected, target).backward()
    ours.task.loss(actual, target).backward()
    assert_alike(plain, ours)


@pytest.mark.parametrize(
    "options",
    [
        {"pool_over": "tissue"},
        {"head": ClassAttentionPooling},
        pytest.param({"magnifications": 2}, marks=pytest.mark.full),
        {"magnifications": 2, "share_backbone": True, "pool_over": "tissue"},
        {"frozen_stages": 1},
    ],
    ids=str,
)
def test_tile_by_tile_is_the_same(options: dict[str, object]) -> None:
    plain = classifier(**options)
    network = copy.deepcopy(plain)
    tiled = TiledModule(network, tiles=(3, 2))
    for seed in (1, 2):  # the second step starts from the running statistics that the first has left
        shown = [slide(side, side - 14, plain.stride, seed) for side in (97, 49)[: plain.magnifications]]
        images, tissue = [image for image, _ in shown], [cells for _, cells in shown]
        expected = plain.train()(images[0], images[1:], tissue)
        network.train()
        lazy, cells = ([LazyImage.from_tensor(t) for t in tensors] for tensors in (images, tissue))
        actual = tiled(lazy[0], lazy[1:], cells)
        plain.task.loss(expected, torch.tensor([1])).backward()
        network.task.loss(actual, torch.tensor([1])).backward()
        torch.testing.assert_close(torch.as_tensor(actual.tolist()).double(), expected.detach(), rtol=0, atol=1e-6)
    assert_alike(plain, network)


class Activated(nn.BatchNorm2d):
    """A BatchNorm that ends with an activation, as timm's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(super().forward(x))
        return activated


class Doubled(nn.BatchNorm2d):
    """A BatchNorm with a mind of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_an_activation_inside_a_norm_stays() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Activated(4)).double()
    twin = copy.deepcopy(backbone)
    cells = over_tissue(backbone, 1)
    x = torch.randn(1, 3, 16, 16).double()
    with cells.shown(torch.ones(1, 1, 16, 16)):
        torch.testing.assert_close(backbone(x), twin(x), rtol=1e-9, atol=1e-9)
    assert backbone.state_dict().keys() == twin.state_dict().keys()
    torch.testing.assert_close(backbone.eval()(x), twin.eval()(x), rtol=1e-9, atol=1e-9)


def test_a_training_step_without_tissue_is_refused() -> None:
    with pytest.raises(ValueError, match="given no map of tissue"):
        classifier().train()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (ResNet((4,), norm="group"), r"has layers.0.1 \(GroupNorm\): choose norm: batch"),
        (VGG((4,)), "VGG has no BatchNorm"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, 3, 1), nn.BatchNorm2d(4)), "has stride 3: .* must divide that of the map, 4"),
        (nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), "the BatchNorm 0 of Sequential has no running"),
        (nn.Sequential(Doubled(3)), "does more than BatchNorm2d"),
    ],
)
def test_norms_that_cannot_are_named(backbone: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        over_tissue(backbone, 4)
