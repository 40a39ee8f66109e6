"""Maps of what a score comes from, at the network's stride, without holding a slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_plugin import TiledModule, materialize
from wsi_trainer.errors import UserError
from wsi_trainer.explain.probe import AttentionScores, GatedFeatures, GatedPixels, at_rest
from wsi_trainer.models import AttentionPooling, SlideClassifier

Method = Literal["activation", "attention", "gradient", "integrated"]
METHODS: tuple[str, ...] = get_args(Method)


@dataclass(frozen=True)
class Attribution:
    """A map over the slide at the network's stride."""

    values: Tensor
    """(rows, columns), or (patches, 1) of a bag: what each position adds to the score; of attention, its weight."""
    stride: int
    """Pixels of the slide for one position, in both directions."""
    peak_bytes: int = 0
    """What was held on the device at the worst moment; 0 where plain PyTorch made the map."""

    @property
    def positive(self) -> Tensor:
        """What speaks for the class; what speaks against it counts as nothing."""
        return self.values.clamp(min=0)


def attribute(
    model: SlideClassifier,
    image: Tensor,
    target: int = 1,
    method: Method = "activation",
    *,
    context: Sequence[Tensor] = (),
    tissue: Sequence[Tensor] = (),
    steps: int = 16,
    budget: int | str | None = None,
) -> Attribution:
    """The map of one slide for a class.

    Args:
        model: The trained network.
        image: The slide (1, 3, height, width), or its bag (patches, 3, size, size), dense or a `LazyImage`.
        target: Index of the class.
        method: What a position's value is. `activation`: gradient × activation of the features that enter the head.
            `attention`: the weight in the head's softmax. `gradient`: gradient × (pixel − glass), summed over the
            position's pixels and colours. `integrated`: the same with the gradient's mean on the way from glass to
            the slide; its sum is the score's difference between the two, up to the steps.
        context: The slide at further magnifications, which are left as they are.
        tissue: Which positions count, for the image and each of its context.
        steps: Steps from glass to the slide, of `integrated`.
        budget: Device memory, by tile-by-tile execution; None runs plain PyTorch.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")
    with at_rest(model):
        if method == "attention":
            return _attention(model, image, target, tissue, budget)
        kind = GatedFeatures if method == "activation" else GatedPixels
        probe = _run(kind(model, target), budget)
        levels = [(k + 0.5) / steps for k in range(steps)] if method == "integrated" else [1.0]
        gradients = [_gate_gradient(probe, model, level, image, context, tissue) for level in levels]
        return Attribution(torch.stack(gradients).mean(dim=0)[0, 0], model.stride, _peak(probe))


def _gate_gradient(
    probe: nn.Module, model: SlideClassifier, level: float, image: Tensor, context: Sequence[Tensor],
    tissue: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    gate = torch.full(
        positions_of(model, image), level, dtype=model.mean.dtype, device=model.device, requires_grad=True
    )
    materialize(probe(gate, image, context, tissue)).backward()
    assert gate.grad is not None
    return gate.grad


def positions_of(model: SlideClassifier, image: Tensor) -> tuple[int, int, int, int]:
    """The shape of a number for each position of the network's map, of which each is a patch where it takes bags."""
    if getattr(model.backbone, "bags", False):
        return (1, 1, image.shape[0], 1)
    height, width = image.shape[2:]
    return (1, 1, -(-height // model.stride), -(-width // model.stride))


def _attention(
    model: SlideClassifier, image: Tensor, target: int, tissue: Sequence[Tensor], budget: int | str | None
) -> Attribution:
    if not isinstance(model.head, AttentionPooling):
        raise UserError(
            f"the head {type(model.head).__name__} has no attention; choose another --method: activation, gradient "
            "or integrated"
        )
    probe = _run(AttentionScores(model), budget)
    with torch.no_grad():
        scores = materialize(probe(image))[0]
        scores = scores[target if model.head.branches > 1 else 0]
        if tissue and model.pool_over == "tissue":
            counts = materialize(tissue[0])[0, 0, : scores.shape[0], : scores.shape[1]]
            scores = scores.masked_fill(counts == 0, -torch.inf)
        return Attribution(torch.softmax(scores.flatten(), 0).view_as(scores), model.stride, _peak(probe))


def _run(probe: nn.Module, budget: int | str | None) -> nn.Module:
    return probe if budget is None else TiledModule(probe, budget=budget)


def _peak(probe: nn.Module) -> int:
    return probe.peak_bytes if isinstance(probe, TiledModule) else 0
