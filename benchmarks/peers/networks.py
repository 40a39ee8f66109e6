"""The networks in the form that all ways can take: a chain of layers, and a head on what it makes of an image.

BatchNorms use their running statistics and are not trained: lightstream can do no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.zoo.resnet import ResNet, resnet18, resnet34
from tests.zoo.vgg import VGG16, GlobalVGG

CLASSES = 4


class Headed(nn.Module):
    """Layers one after the other, and a head."""

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*layers)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A bag's class from the features of its patches, each with its own weight."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(channels, 64), nn.Tanh(), nn.Linear(64, 1))
        self.classes = nn.Linear(channels, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        weights = torch.softmax(self.score(features), 0)
        return self.classes((weights * features).sum(0, keepdim=True))  # type: ignore[no-any-return]


def vgg16(width: float) -> tuple[list[nn.Module], int]:
    net = GlobalVGG(VGG16, width_mult=width)
    layers: list[nn.Module] = []
    for layer in net.features:
        # No link of the chain begins with a ReLU in place: it would overwrite what a checkpoint keeps.
        if isinstance(layer, nn.ReLU):
            layers[-1] = nn.Sequential(layers[-1], layer)
        else:
            layers.append(layer)
    return layers, net.fc.in_features


def of_resnet(net: ResNet) -> tuple[list[nn.Module], int]:
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    blocks = [block for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for block in stage]
    return [stem, *blocks], net.stage_channels[-1]


LAYERS: dict[str, Callable[[float], tuple[list[nn.Module], int]]] = {
    "vgg16": vgg16,
    "resnet18": lambda width: of_resnet(resnet18(width_mult=width)),
    "resnet34": lambda width: of_resnet(resnet34(width_mult=width)),
}


def build(name: str, width: float, bag: bool) -> Headed:
    """A network with the same numbers in every process."""
    torch.manual_seed(0)
    layers, channels = LAYERS[name](width)
    pool: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = Headed([*layers, *pool], Attention(channels)) if bag else of_image(layers, pool, channels)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    return net


def of_image(layers: list[nn.Module], pool: list[nn.Module], channels: int) -> Headed:
    return Headed(layers, nn.Sequential(*pool, nn.Linear(channels, CLASSES)))
