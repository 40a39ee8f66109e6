"""How much each position of the last map adds to the score of a class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wsi_trainer.models import SlideClassifier


@dataclass(frozen=True)
class Attribution:
    """A map over the slide at the network's stride."""

    values: Tensor
    """(rows, columns): gradient × activation of each position, summed over the channels."""
    stride: int
    """Pixels of the slide for one position, in both directions."""

    @property
    def positive(self) -> Tensor:
        """What speaks for the class; what speaks against it counts as nothing."""
        return self.values.clamp(min=0)


def attribute(model: SlideClassifier, image: Tensor, target: int = 1) -> Attribution:
    """The attribution of one image (1, 3, height, width) for a class.

    The gradient is taken at the features that enter the head. Each position stands for the receptive field
    around it.
    """
    model.eval()
    with torch.no_grad():
        features = model.backbone(model.normalise(image))
    features = features.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(_score(model, features, target), features)
    return Attribution((gradient * features.detach()).sum(dim=1)[0], _stride(model.backbone))


def _score(model: SlideClassifier, features: Tensor, target: int) -> Tensor:
    """The logit of the class; the negative class of a binary task has the negated one."""
    logits = model.classifier(model.standardise(model.head(features)))[0]
    if model.task.outputs == 1:
        return logits[0] if target == 1 else -logits[0]
    return logits[target]


def receptive_field(backbone: nn.Module, size: int = 512) -> int:
    """How many pixels across the backbone looks at for one position, found by asking for the gradient."""
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


def _stride(backbone: nn.Module) -> int:
    stride = getattr(backbone, "stride", None)
    if not isinstance(stride, int):
        raise TypeError(
            f"the backbone {type(backbone).__name__} has no integer attribute stride; set it to the pixels "
            "of the slide for one position of its map"
        )
    return stride
