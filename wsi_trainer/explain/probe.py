"""A network with a gate of ones: the gradient of the score with respect to the gate is the map.

A gate multiplies what it is put on, one number for each position of the network's map. By the chain rule its gradient
is the sum of gradient × value over all that it multiplies, so gradient × input of each cell is had without the
gradient of any pixel: it is as large as the map, and the slide is nowhere held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.explain.score import score
from wsi_trainer.models import SlideClassifier

GLASS = 255
"""The pixel that stands for nothing: what is not tissue is white."""


class GatedFeatures(nn.Module):
    """The score of a slide whose features, at the finest magnification, are multiplied by the gate."""

    def __init__(self, model: SlideClassifier, target: int) -> None:
        super().__init__()
        self.model = model
        self.target = target

    def forward(self, gate: Tensor, image: Tensor, context: Sequence[Tensor], tissue: Sequence[Tensor]) -> Tensor:
        with _once(self.model.backbone, lambda x: x, lambda features: features * _fitted(gate, features)):
            logits = self.model(image, context, tissue)
        return score(self.model.task, logits, self.target)


class GatedPixels(GatedFeatures):
    """The score of a slide whose pixels, at the finest magnification, are mixed with glass: glass + gate · (x − glass).

    A gate of ones is the slide, one of zeros is glass.
    """

    def forward(self, gate: Tensor, image: Tensor, context: Sequence[Tensor], tissue: Sequence[Tensor]) -> Tensor:
        model = self.model
        glass = model.normalise(torch.full((1, 3, 1, 1), GLASS, dtype=torch.uint8, device=model.device))

        def mixed(x: Tensor) -> Tensor:
            if getattr(model.backbone, "bags", False):
                return glass + gate.permute(2, 0, 1, 3) * (x - glass)
            large = functional.interpolate(gate, scale_factor=model.stride, mode="nearest")
            return glass + large[:, :, : x.shape[2], : x.shape[3]] * (x - glass)

        with _once(model.backbone, mixed, lambda features: features):
            logits = model(image, context, tissue)
        return score(model.task, logits, self.target)


class AttentionScores(nn.Module):
    """The logits of attention at the finest magnification, (1, branches, h, w)."""

    def __init__(self, model: SlideClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        head: Any = self.model.head
        scores: Tensor = head.scores(self.model.backbone(self.model.normalise(image)))
        return scores


@contextmanager
def _once(backbone: nn.Module, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change what the backbone takes and returns in its first call: later ones are of coarser magnifications."""
    calls = {"before": 0, "after": 0}

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        calls["before"] += 1
        return (before(args[0]), *args[1:]) if calls["before"] == 1 else None

    def leave(_: nn.Module, args: tuple[Tensor, ...], features: Tensor) -> Tensor | None:
        calls["after"] += 1
        return after(features) if calls["after"] == 1 else None

    handles = [backbone.register_forward_pre_hook(enter), backbone.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fitted(gate: Tensor, features: Tensor) -> Tensor:
    """The gate in the size of the features: a network that rounds down has a position less at the end."""
    height, width = features.shape[2:]
    if gate.shape[2] < height or gate.shape[3] < width:
        raise ValueError(
            f"the backbone returns {height} × {width} positions where its stride gives {gate.shape[2]} × "
            f"{gate.shape[3]}; correct its attribute stride"
        )
    return gate[:, :, :height, :width]


@contextmanager
def at_rest(model: SlideClassifier) -> Iterator[None]:
    """Evaluation mode, and no gradient of any parameter: only that of the gate is asked for."""
    training = model.training
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)
