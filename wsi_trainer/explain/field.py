"""How far a network looks."""

from __future__ import annotations

import torch
from torch import nn


def receptive_field(backbone: nn.Module, size: int = 512, most: int = 2048) -> int:
    """How many pixels across the backbone looks at for one position, found by asking for the gradient.

    The image that is asked with grows until the field fits into it; a network that sees more than `most` pixels is
    said to see `most`.
    """
    field = _extent(backbone, size)
    return field if field < size or size >= most else receptive_field(backbone, 2 * size, most)


def _extent(backbone: nn.Module, size: int) -> int:
    backbone.eval()
    generator = torch.Generator().manual_seed(0)
    reference = next(backbone.parameters())
    image = torch.rand(1, 3, size, size, generator=generator).to(reference).requires_grad_()
    features = backbone(image)
    rows, columns = features.shape[2:]
    (gradient,) = torch.autograd.grad(features[0, :, rows // 2, columns // 2].sum(), image)
    seen = gradient.abs().sum(dim=(0, 1)) > 0
    extents = [int(line.nonzero().max() - line.nonzero().min()) + 1 for line in (seen.any(0), seen.any(1))]
    return max(extents)
