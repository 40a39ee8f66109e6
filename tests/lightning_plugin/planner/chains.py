"""Random networks of the kind that people train, large enough that memory is that of maps, not of small tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            *norms(norm, width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + x)


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(x)


def norms(kind: str, width: int) -> list[nn.Module]:
    return {"none": [], "batch": [nn.BatchNorm2d(width)], "group": [nn.GroupNorm(2, width)]}[kind]


@dataclass(frozen=True)
class Recipe:
    """A network, the size of its image, which share of what it can use it is given, and whether there is a disk."""

    steps: tuple[str, ...]
    width: int
    norm: str
    side: int
    share: float
    seed: int
    disk: bool

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = []
        width, last = self.width, 3
        for step in self.steps:
            if step == "conv":
                layers += [nn.Conv2d(last, width, 3, padding=1), *norms(self.norm, width), nn.ReLU(inplace=True)]
                last = width
            elif step == "stride":
                width *= 2
                layers += [nn.Conv2d(last, width, 3, stride=2, padding=1), *norms(self.norm, width), nn.GELU()]
                last = width
            elif step == "pool":
                layers.append(nn.MaxPool2d(2))
            elif step == "average":
                layers.append(nn.AvgPool2d(3, 2, 1))
            elif step == "up":
                layers.append(nn.Upsample(scale_factor=2))
            elif last != 3:
                layers.append(Residual(last, self.norm) if step == "residual" else Gate(last))
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 3))


STEPS = ("conv", "conv", "conv", "stride", "pool", "average", "residual", "gate", "up")


def recipes() -> st.SearchStrategy[Recipe]:
    steps = st.lists(st.sampled_from(STEPS), min_size=1, max_size=6).map(lambda s: ("conv", *s))
    return st.builds(
        Recipe,
        steps=steps.filter(lambda s: s.count("up") <= 1),
        width=st.sampled_from([4, 8, 12]),
        norm=st.sampled_from(["none", "batch", "group"]),
        side=st.integers(64, 160),
        share=st.floats(0.0, 1.2),
        seed=st.integers(0, 99),
        disk=st.booleans(),
    )
