"""A network on several images of different sizes at once, with BatchNorms that see all of them: the reference."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6, momentum=None),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(6, affine=False),
        nn.Linear(6, 2),
    ).double()


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(n, 3, *size, dtype=torch.float64, generator=generator) for n, size in ((1, (31, 26)), (2, (17, 40)))
    ]


def joint(net: nn.Sequential, xs: list[Tensor]) -> list[Tensor]:
    """Every layer on every image; a BatchNorm on all positions of all images, side by side in one long row."""
    for layer in net:
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            xs = [layer(x) for x in xs]
            continue
        rows = [x.flatten(2).transpose(0, 1).flatten(1) if x.dim() > 2 else x.t() for x in xs]
        layer.__class__ = nn.BatchNorm1d
        together = layer(torch.cat(rows, 1).unsqueeze(0)).squeeze(0).split([r.shape[1] for r in rows], 1)
        xs = [
            y.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape) for y, x in zip(together, xs, strict=True)
        ]
    return xs
