"""Planning a training step of a model on a slide of some size, without the slide."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, Plan, make_plan
from lightning_plugin.planner.analysis.recorded import Blank
from wsi_trainer.errors import UserError
from wsi_trainer.models import SegmentationTask, SlideClassifier


def blank(*shape: int) -> LazyImage:
    """An image of which only the shape is known."""
    return LazyImage(Blank(shape, torch.uint8))


class Step(nn.Module):
    """A model with all that it sees of a slide beside the image: further magnifications, and where tissue is."""

    def __init__(self, model: SlideClassifier, factors: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.factors = tuple(factors)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        shapes = [(height, width), *((int(height / f), int(width / f)) for f in self.factors)]
        context = [blank(1, 3, *shape) for shape in shapes[1:]]
        tissue: list[Tensor] = []
        if self.model.wants_tissue:
            stride = self.model.stride
            tissue = [blank(1, 1, -(-rows // stride), -(-columns // stride)) for rows, columns in shapes]
        task = self.model.task
        if not isinstance(task, SegmentationTask):
            return self.model(image, context, tissue)
        logits, vector = self.model.at_pixels_and_pooled(image, tissue[0] if tissue else None)
        loss = task.loss(logits, blank(1, 1, height, width))  # a step needs no more of pixels
        return loss if vector is None else torch.cat([loss[None], self.model.last_beside(vector)[0]])


def plan_step(
    model: SlideClassifier,
    height: int,
    width: int,
    budget: str | int,
    device: str = "cpu",
    factors: Sequence[float] = (),
) -> Plan:
    """The plan of a training step on a slide of this size; nothing is allocated.

    Args:
        model: The network; its statistics are not touched.
        height: Rows of the slide.
        width: Columns of the slide.
        budget: Device memory that the step may use.
        device: Whose rates rank the plans.
        factors: How much coarser each further magnification is than the slide; by default as many, each by 4.
    """
    if height < 1 or width < 1:
        raise UserError(f"a slide of {height} × {width} pixels cannot be planned")
    return plan_shape(model, (1, 3, height, width), budget, device, factors)


def plan_shape(
    model: SlideClassifier,
    shape: tuple[int, ...],
    budget: str | int,
    device: str = "cpu",
    factors: Sequence[float] = (),
) -> Plan:
    """The plan of a training step on an image, (1, 3, height, width), or on a bag, (patches, 3, size, size)."""
    model.train()
    model.standardise.eval()  # it would write the statistics of a slide that is not there
    factors = factors or [4.0**level for level in range(1, model.levels)]
    try:
        return make_plan(Step(model, factors), shape, budget=budget, device=device, dtype=torch.uint8)
    finally:
        model.train()
