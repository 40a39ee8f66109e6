"""Attribution: maps of the positions that a score comes from, at the network's stride, without holding a slide.

The gradient of the score with respect to a gate of ones is the map. A gate multiplies what it is put on, one number for
each position of the network's map. By the chain rule its gradient is the sum of gradient × value over all that it
multiplies, so gradient × input of each cell is had without the gradient of any pixel: it is as large as the map, and
the slide is nowhere held.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_plugin import TiledModule, materialize
from wsi_trainer.errors import UserError
from wsi_trainer.models import SlideClassifier
from wsi_trainer.models.slide_model import at_positions
from wsi_trainer.models.tasks import Cells, SlidePart, Task
from wsi_trainer.slide.formats.base import FILL


def targets_of(task: Task) -> tuple[str, ...]:
    """Targets of a map: the classes, or else the one number that is predicted, those of further targets behind."""
    return tuple(name if not place else f"{of} {name}" for place, of, name in _all_of(task))


def _all_of(task: Task) -> Iterator[tuple[int, str, str]]:
    for place, part in enumerate(task.slide_parts):
        for name in named_of(part.task):
            yield place, part.name, name


def named_of(task: Task) -> tuple[str, ...]:
    """The classes of one target, or else the one number that is predicted."""
    return task.classes or task.names[:1]


def part_of(task: Task, target: int) -> tuple[SlidePart, int]:
    """The target of slides that a target of a map is one of, and its place among those of it."""
    for part in task.slide_parts:
        if target < (count := len(named_of(part.task))):
            return part, target
        target -= count
    raise IndexError(f"there is no target {target} more")


def label_of(task: Task, target: int, cells: Cells) -> str:
    """The label of a slide as targets of maps are called."""
    part, _ = part_of(task, target)
    label = cells.get(part.task.columns[0], "")
    return label if part.name == task.slide_parts[0].name else f"{part.name} {label}"


def index_of(task: Task, name: str | None) -> int:
    """The place of a target; without a name the second class of two, the last of an order, or the first of others."""
    names, first = targets_of(task), task.slide_parts[0].task
    if name is None:
        own = named_of(first)
        return 0 if len(own) == first.outputs else len(own) - 1
    if name not in names:
        raise UserError(f"--target is {name!r}; this model has {', '.join(names)}")
    return names.index(name)


def folder_of(task: Task, method: str, target: str | None) -> str:
    """The name of the folder of maps: the method, and the target where that is another than without a name."""
    place = index_of(task, target)
    if place == index_of(task, None):
        return method
    return f"{method}-" + re.sub(r'[\x00-\x1f/\\:*?"<>|]', "_", targets_of(task)[place])


def score(task: Task, logits: Tensor, target: int) -> Tensor:
    """The score of one slide's target, from its (1, outputs) logits: `Task.explained` of the target of slides."""
    part, place = part_of(task, target)
    return part.task.explained(logits[:, part.logits], place)


class GatedFeatures(nn.Module):
    """The score of a slide whose features, at the finest magnification, are multiplied by the gate."""

    def __init__(self, model: SlideClassifier, target: int) -> None:
        super().__init__()
        self.model = model
        self.target = target

    def forward(
        self, gate: Tensor, image: Tensor, context: Sequence[Tensor], tissue: Sequence[Tensor], places: Tensor | None,
        covariates: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        with _once(self.model.backbone, lambda x: x, lambda features: features * at_positions(gate, features)):
            logits = self.model(image, context, tissue, places=places, covariates=covariates)
        return score(self.model.task, logits, self.target)


class GatedPixels(GatedFeatures):
    """The score of a slide whose pixels, at the finest magnification, are mixed with background b: b + gate · (x − b).

    A gate of ones is the slide, one of zeros is background.
    """

    def forward(
        self, gate: Tensor, image: Tensor, context: Sequence[Tensor], tissue: Sequence[Tensor], places: Tensor | None,
        covariates: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        model = self.model
        background = model.normalise(torch.full((1, 3, 1, 1), FILL, dtype=torch.uint8, device=gate.device))

        def mixed(x: Tensor) -> Tensor:
            if getattr(model.backbone, "bags", False):
                return background + gate.permute(2, 0, 1, 3) * (x - background)
            large = functional.interpolate(gate, scale_factor=model.stride, mode="nearest")
            return background + large[:, :, : x.shape[2], : x.shape[3]] * (x - background)

        with _once(model.backbone, mixed, lambda features: features):
            logits = model(image, context, tissue, places=places, covariates=covariates)
        return score(model.task, logits, self.target)


class AttentionScores(nn.Module):
    """The logits of attention at the finest magnification, (1, branches, h, w)."""

    def __init__(self, model: SlideClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, tissue: Sequence[Tensor], places: Tensor | None) -> Tensor:
        return self.model.scores(image, tissue, places)


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


def receptive_field(backbone: nn.Module, size: int = 512, most: int = 2048) -> int:
    """Receptive field of a position of the backbone's map, in pixels across, measured with one backward pass.

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
    """Peak of the device's memory; 0 where plain PyTorch made the map."""

    @property
    def positive(self) -> Tensor:
        """The positive part of the map, which speaks for the class."""
        return self.values.clamp(min=0)


def attribute(
    model: SlideClassifier,
    image: Tensor,
    target: int = 1,
    method: Method = "activation",
    *,
    context: Sequence[Tensor] = (),
    tissue: Sequence[Tensor] = (),
    places: Tensor | None = None,
    covariates: Tensor | None = None,
    steps: int = 16,
    budget: int | str | None = None,
    network: Callable[[nn.Module, int], nn.Module] | None = None,
) -> Attribution:
    """The map of one slide for a class.

    Args:
        model: The trained network.
        image: The slide (1, 3, height, width), or its bag (patches, 3, size, size), dense or a `LazyImage`.
        target: Index of the class.
        method: What a position's value is. `activation`: gradient × activation of the features that enter the head.
            `attention`: the weight in the head's softmax. `gradient`: gradient × (pixel − background), summed over the
            position's pixels and colours. `integrated`: the same with the gradient's mean on the way from background to
            the slide; its sum is the score's difference between the two, up to the steps.
        context: The slide at further magnifications, which are left as they are.
        tissue: Which positions count, for the image and each of its context.
        places: Where its patches lie, for a head that asks for it.
        covariates: The numbers of the model's covariates, which stay as they are: a map is of the slide's part.
        steps: Steps from background to the slide, of `integrated`.
        budget: Device memory, by tile-by-tile execution; None runs plain PyTorch.
        network: Makes what runs a question for a target, where it is kept for further slides; by default by `budget`.
    """
    network = network or (lambda question, _: question if budget is None else TiledModule(question, budget=budget))
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")
    with at_rest(model):
        if method == "attention":
            return _attention(model, image, target, tissue, places, network)
        kind = GatedFeatures if method == "activation" else GatedPixels
        probe = network(kind(model, target), target)
        levels = [(k + 0.5) / steps for k in range(steps)] if method == "integrated" else [1.0]
        beside = tissue, places, covariates
        gradients = [_gate_gradient(probe, model, level, image, context, *beside) for level in levels]
        return Attribution(torch.stack(gradients).mean(dim=0)[0, 0], model.stride, _peak(probe))


def _gate_gradient(
    probe: nn.Module, model: SlideClassifier, level: float, image: Tensor, context: Sequence[Tensor],
    tissue: Sequence[Tensor], places: Tensor | None, covariates: Tensor | None,
) -> Tensor:  # fmt: skip
    gate = torch.full(
        positions_of(model, image), level, dtype=model.mean.dtype, device=image.device, requires_grad=True
    )
    materialize(probe(gate, image, context, tissue, places, covariates)).backward()
    assert gate.grad is not None
    return gate.grad


def positions_of(model: SlideClassifier, image: Tensor) -> tuple[int, int, int, int]:
    """The shape of a number for each position of the network's map, of which each is a patch where it takes bags."""
    if getattr(model.backbone, "bags", False):
        return (1, 1, image.shape[0], 1)
    height, width = image.shape[2:]
    return (1, 1, -(-height // model.stride), -(-width // model.stride))


def _attention(
    model: SlideClassifier, image: Tensor, target: int, tissue: Sequence[Tensor], places: Tensor | None,
    network: Callable[[nn.Module, int], nn.Module],
) -> Attribution:  # fmt: skip
    if not model.head.attends:
        raise UserError(
            f"the head {type(model.head).__name__} has no attention; choose another --method: activation, or of pixels "
            "gradient or integrated"
        )
    probe = network(AttentionScores(model), target)
    with torch.no_grad():
        scores = materialize(probe(image, tissue, places))[0]
        part, place = part_of(model.task, target)
        branch = part.logits.start + min(place, part.task.outputs - 1)  # two classes have one output
        scores = scores[branch if model.head.branches > 1 else 0]
        return Attribution(torch.softmax(scores.flatten(), 0).view_as(scores), model.stride, _peak(probe))


def _peak(probe: nn.Module) -> int:
    return probe.peak_bytes if isinstance(probe, TiledModule) else 0
