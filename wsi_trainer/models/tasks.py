"""Tasks: targets of slides, losses, predictions and their scores.

A task names the columns of the manifest that it reads. `models.segmentation` has the task with a class for each pixel,
and `models.targets` that of several targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import (
    MULTI_LABEL_SCORES,
    ORDINAL_SCORES,
    RISK_SCORES,
    SCORES,
    VALUE_SCORES,
    ClassPredictions,
    Decision,
    MultiLabelPredictions,
    Predictions,
    RiskPredictions,
    Score,
    ValuePredictions,
)
from wsi_trainer.metrics.decision import MOST_PROBABLE, fixed

if TYPE_CHECKING:
    from wsi_trainer.regions.target import Legend

Weights = Sequence[float] | Literal["balanced"] | None


class ClassWeights(nn.Module):
    """One weight for each class. "balanced" ones are learnt from the training slides and kept in the checkpoint."""

    def __init__(self, weights: Weights, count: int, name: str = "class_weights") -> None:
        super().__init__()
        if isinstance(weights, str) and weights != "balanced":
            raise ValueError(f"{name} is {weights!r}; give a number for each class, balanced, or null")
        given = None if weights is None or isinstance(weights, str) else tuple(weights)
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {len(given)} numbers for {count} classes")
        if given is not None and min(given) < 0:
            raise ValueError(f"{name} is {list(given)}; a weight cannot be negative")
        self.balanced = isinstance(weights, str)
        self.register_buffer("values", torch.ones(count) if given is None else torch.tensor(given))
        self.values: Tensor

    def balance(self, counts: Tensor) -> None:
        """Weigh each class by the inverse of its count, with a mean of 1 over the slides."""
        if self.balanced:
            present = counts > 0
            weights = counts.sum() / (present.sum() * counts.clamp(min=1))
            self.values.copy_(torch.where(present, weights, torch.ones_like(weights)))

    def forward(self, like: Tensor) -> Tensor:
        """The weights in the dtype and on the device of another tensor."""
        return self.values.to(like)


Cells = Mapping[str, str]
"""One line of the manifest: its cells by column."""
Targets = Mapping[str, Tensor]
"""The targets of slides that are known, by name."""


@dataclass(frozen=True)
class Owners:
    """Whose predictions they are, row by row."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    sites: tuple[str, ...] = ()


class SlidePart(NamedTuple):
    """One target of slides."""

    name: str
    task: Task
    logits: slice
    """Its places among the outputs of the last layer."""


class Task(nn.Module):
    """From the numbers of the last layer to a loss and a prediction.

    Attributes:
        dense: Whether it has a target for each pixel, which is drawn, instead of one for the slide.
        target_name: Name of the target, where it is the only one.
        entries: Numbers of the target of a slide.
        legend: Classes of drawn regions, where the target is of pixels.
        outputs: Numbers of the last layer.
        columns: Columns of the manifest that hold the target.
        may_be_empty: Whether a cell of these may be empty.
        names: What a prediction's numbers are called.
        classes: Names of the classes, where there are any.
        scores: The scores of its predictions, by name.
    """

    dense = False
    target_name = "label"
    entries = 1
    legend: Legend | None = None
    outputs: int
    columns: tuple[str, ...] = ("label",)
    may_be_empty = False
    names: tuple[str, ...]
    classes: tuple[str, ...] = ()
    scores: Mapping[str, Score]

    @property
    def by_target(self) -> Mapping[str, Task]:
        """The task of each target by the target's name; of a single one this task."""
        return {self.target_name: self}

    @property
    def pixels(self) -> Task | None:
        """The task of the target of pixels, where there is one."""
        return self if self.dense else None

    @property
    def pixel_weight(self) -> float:
        """The factor of the loss of pixels."""
        return 1.0

    @property
    def slide_parts(self) -> list[SlidePart]:
        """The targets of slides, and the logits of each."""
        return [] if self.dense else [SlidePart(self.target_name, self, slice(0, self.outputs))]

    @property
    def has_threshold(self) -> bool:
        """True where a threshold can decide: between two classes, or for a label."""
        return False

    def decisions_by(self, rule: str) -> dict[str, Decision] | None:
        """The decision of each target that has a threshold; None by a rule that asks validation slides."""
        if rule == MOST_PROBABLE:
            return {}
        if (given := fixed(rule)) is None:
            return None
        parts = (part for part in self.slide_parts if part.task.has_threshold)
        return {part.name: Decision((given,) * part.task.entries, rule) for part in parts}

    def decided(self, predicted: NDArray[np.float64], decisions: Mapping[str, Decision]) -> dict[str, list[str]]:
        """Decide, in words, for each target of slides with classes, from (rows, len(names)) predictions."""
        found, at = {}, 0
        for name, task in self.by_target.items():
            own, at = predicted[:, at : at + len(task.names)], at + len(task.names)
            if task.classes and not task.dense:
                rows = tuple(map(str, range(len(own))))
                unknown = np.full((len(own), task.entries), np.nan)
                table = task.predictions(Owners(rows, rows), unknown[:, 0] if task.entries == 1 else unknown, own)
                table = table.with_decisions({table.TARGET: decisions[name]} if name in decisions else {})
                found[name] = [table.words(row).predicted for row in range(len(own))]
        return found

    def sentences_on(self, decisions: Mapping[str, Decision]) -> list[str]:
        """Sentences on what is decided for, and from where on, of each target with a threshold."""
        return [line for name, one in decisions.items() for line in one.sentences(self.by_target[name].classes)]

    @property
    def legends(self) -> dict[str, Legend]:
        """The classes of drawn regions, of each target of pixels."""
        return {name: task.legend for name, task in self.by_target.items() if task.legend is not None}

    @property
    def whole(self) -> Task:
        """The task of all targets that this one names."""
        return self

    def read(self, cells: Cells) -> dict[str, Tensor]:
        """The targets of a slide that are known, by name: cells are parsed here and nowhere else."""
        return {self.target_name: self.target(cells)}

    def row(self, targets: Targets) -> Tensor:
        """The targets of one slide as `predictions` takes them; NaN where one is not known."""
        return targets[self.target_name]

    def loss_of(self, logits: Tensor, targets: Targets) -> Tensor:
        """The mean loss of (N, outputs) logits over the targets that are known."""
        return self.loss(logits, targets[self.target_name])

    def prepare_from(self, targets: Targets) -> None:
        """Learn what has to be known of the training slides, from the targets that are known of them."""
        for name, task in self.by_target.items():
            task.prepare(targets[name])

    def lacking(self, targets: Targets) -> str | None:
        """The reason for which nothing can be learnt of a target, nor scored; None where all are fine."""
        tasks = self.by_target
        for name, task in tasks.items():
            lack = task.lack(targets[name]) if name in targets else "no slide with a label"
            if lack is not None:
                return f"of the target {name}, {lack}" if len(tasks) > 1 else lack
        return None

    def target(self, cells: Cells) -> Tensor:
        """The target of one slide, with a leading dimension of 1; an error says which cell is wrong and how."""
        raise NotImplementedError

    def stratum(self, cells: Cells) -> str:
        """The stratum, kept in proportion when slides are split."""
        raise NotImplementedError

    def marks(self, cells: Cells) -> tuple[str, ...]:
        """The labels that apply, where they do not exclude each other: each is then kept in proportion."""
        return ()

    def prepare(self, targets: Tensor) -> None:
        """Learn what has to be known of the training slides' targets, before the first step."""

    def lack(self, targets: Tensor) -> str | None:
        """The reason for which nothing can be learnt from these targets, nor scored on them; None where it can."""
        return None

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean loss of (N, outputs) logits."""
        raise NotImplementedError

    def predict(self, logits: Tensor) -> Tensor:
        """The (N, len(names)) predictions of (N, outputs) logits."""
        raise NotImplementedError

    def explained(self, logits: Tensor, place: int) -> Tensor:
        """The number that a map explains, from the (1, outputs) logits of a slide.

        The logit of a class; of the negative class of two the negated one; of a class of an order the logarithm of its
        probability; of a task without classes the number it predicts.
        """
        if not self.classes:
            return self.predict(logits)[0, 0]
        if len(self.classes) == self.outputs:
            return logits[0, place]
        return self.predict(logits)[0, place].log()

    def predictions(self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]) -> Predictions:
        """Targets and predictions as what scores are computed of."""
        raise NotImplementedError


def check_classes(classes: Sequence[str] | None) -> tuple[str, ...]:
    """The names as a tuple; an error where they name no choice, as `null` in a config does not."""
    if classes is None or len(set(classes)) != len(classes) or len(classes) < 2:
        raise ValueError(f"classes is {classes and list(classes)}; give at least two different names")
    return tuple(classes)


def check_smoothing(value: float) -> float:
    """The share of the target that is spread; an error where it is none."""
    if not 0 <= value < 1:
        raise ValueError(f"label_smoothing is {value}; it must be at least 0 and below 1")
    return value


def number(cells: Cells, column: str) -> float:
    """A cell as a number."""
    try:
        value = float(cells[column])
    except ValueError as error:
        raise UserError(f"has {column} {cells[column]!r}, which is not a number") from error
    if not isfinite(value):
        raise UserError(f"has {column} {cells[column]!r}; it must be a finite number")
    return value


def yes_or_no(cells: Cells, column: str) -> bool:
    """A cell as 0 or 1, in any of the usual spellings."""
    text = cells[column].lower()
    if text in ("1", "1.0", "true", "yes"):
        return True
    if text in ("0", "0.0", "false", "no"):
        return False
    raise UserError(f"has {column} {cells[column]!r}; it must be 0 or 1")


class ClassTask(Task):
    """A task with named classes; a column holds the name."""

    scores = SCORES

    def __init__(self, classes: Sequence[str], outputs: int, column: str | None = None) -> None:
        super().__init__()
        self.columns = (column or "label",)
        self.classes = check_classes(classes)
        self.names = tuple(f"probability_{name}" for name in self.classes)
        self.outputs = outputs

    def target(self, cells: Cells) -> Tensor:
        cell, column = cells[self.columns[0]], self.columns[0]
        if cell not in self.classes:
            raise UserError(
                f"has the {column} {cell!r}, which is none of the classes {', '.join(map(repr, self.classes))}; "
                "correct the manifest or the task's classes"
            )
        return torch.tensor([self.classes.index(cell)])

    def stratum(self, cells: Cells) -> str:
        return cells[self.columns[0]]

    def lack(self, targets: Tensor) -> str | None:
        present = [self.classes[int(index)] for index in targets.unique()]
        return f"slides of the class {present[0]!r} only" if len(present) == 1 else None

    @property
    def has_threshold(self) -> bool:
        return len(self.classes) == 2

    def probabilities(self, logits: Tensor) -> Tensor:
        """The (N, classes) probabilities of the logits."""
        raise NotImplementedError

    def predict(self, logits: Tensor) -> Tensor:
        return self.probabilities(logits)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> ClassPredictions:
        labels = np.where(np.isnan(targets), -1, targets).astype(np.int64)
        return ClassPredictions(owners.slides, owners.patients, self.classes, labels, predicted, owners.sites)


class BinaryTask(ClassTask):
    """Two classes, one logit: the log odds of the second class."""

    def __init__(
        self,
        classes: Sequence[str] = ("0", "1"),
        positive_weight: float | Literal["balanced"] = 1.0,
        label_smoothing: float = 0.0,
        column: str | None = None,
    ) -> None:
        """Build the task.

        Args:
            classes: The two labels as the manifest writes them, the negative one first.
            positive_weight: Weight of a positive slide in the loss, for classes of unequal size; balanced takes the
                number of negative training slides for each positive one.
            label_smoothing: Share of the target that is spread over both classes.
            column: Column of the manifest with the label; `label` by default.
        """
        super().__init__(classes, 1, column)
        if len(self.classes) != 2:
            raise ValueError(f"BinaryTask has two classes, not {list(classes)}; use MultiClassTask")
        self.weight = ClassWeights(
            "balanced" if positive_weight == "balanced" else [float(positive_weight)], 1, "positive_weight"
        )
        self.label_smoothing = check_smoothing(label_smoothing)

    def prepare(self, targets: Tensor) -> None:
        if self.weight.balanced and targets.any():
            self.weight.values.fill_(float((targets == 0).sum() / (targets == 1).sum()))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        truth = target.to(logits.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
        return functional.binary_cross_entropy_with_logits(logits[:, 0], truth, pos_weight=self.weight(logits))

    def explained(self, logits: Tensor, place: int) -> Tensor:
        return logits[0, 0] if place == 1 else -logits[0, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        positive = torch.sigmoid(logits)
        return torch.cat([1 - positive, positive], dim=1)


class MultiClassTask(ClassTask):
    """Several exclusive classes, one logit for each."""

    def __init__(
        self,
        classes: Sequence[str],
        class_weights: Sequence[float] | Literal["balanced"] | None = None,
        label_smoothing: float = 0.0,
        column: str | None = None,
    ) -> None:
        """Build the task.

        Args:
            classes: The labels as the manifest writes them.
            class_weights: Weight of each class in the loss; balanced weighs by how rare it is among the training
                slides.
            label_smoothing: Share of the target that is spread over all classes.
            column: Column of the manifest with the label; `label` by default.
        """
        super().__init__(classes, len(classes), column)
        self.weights = ClassWeights(class_weights, len(classes))
        self.label_smoothing = check_smoothing(label_smoothing)

    def prepare(self, targets: Tensor) -> None:
        self.weights.balance(torch.bincount(targets, minlength=len(self.classes)))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        # A single slide would be divided by its own weight again, which cancels it: weigh the plain mean instead.
        losses = functional.cross_entropy(
            logits, target, weight=self.weights(logits), label_smoothing=self.label_smoothing, reduction="none"
        )
        return losses.mean()

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=1)


class MultiLabelTask(Task):
    """Each class applies or not, by itself: one logit and one column of the manifest for each.

    A column holds 0 or 1, or nothing where it is not known; what is not known counts for nothing in loss and scores.
    """

    scores = MULTI_LABEL_SCORES
    may_be_empty = True
    has_threshold = True

    def __init__(
        self,
        classes: Sequence[str],
        positive_weights: Sequence[float] | Literal["balanced"] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        """Build the task.

        Args:
            classes: Columns of the manifest, one for each label.
            positive_weights: Weight in the loss of a slide to which a label applies, for each label; balanced takes
                the number of training slides to which it does not apply for each one to which it does.
            label_smoothing: Share of the target that is spread over both answers.
        """
        super().__init__()
        if not classes or len(set(classes)) != len(classes):
            raise ValueError(f"classes is {list(classes)}; give different names, at least one")
        self.classes = self.columns = tuple(classes)
        self.names = tuple(f"probability_{name}" for name in classes)
        self.outputs = self.entries = len(classes)
        self.weights = ClassWeights(positive_weights, len(classes), "positive_weights")
        self.label_smoothing = check_smoothing(label_smoothing)

    def target(self, cells: Cells) -> Tensor:
        values = [float(yes_or_no(cells, name)) if cells[name] else float("nan") for name in self.classes]
        if all(np.isnan(values)):
            raise UserError(f"has no label at all in the columns {', '.join(self.classes)}; fill in one")
        return torch.tensor([values])

    def stratum(self, cells: Cells) -> str:
        return ""  # most combinations of labels are too rare to be kept in proportion; each by itself is not

    def marks(self, cells: Cells) -> tuple[str, ...]:
        return tuple(name for name in self.classes if cells[name] and yes_or_no(cells, name))

    def prepare(self, targets: Tensor) -> None:
        if self.weights.balanced:
            positive, negative = (targets == 1).sum(0), (targets == 0).sum(0)
            self.weights.values.copy_(torch.where(positive > 0, negative / positive.clamp(min=1), 1.0))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        known = ~target.isnan()
        truth = target.nan_to_num().to(logits.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses = functional.binary_cross_entropy_with_logits(
            logits, truth, pos_weight=self.weights(logits), reduction="none"
        )
        return (losses * known).sum() / known.sum().clamp(min=1)

    def predict(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> MultiLabelPredictions:
        return MultiLabelPredictions(owners.slides, owners.patients, self.classes, targets, predicted, owners.sites)


class OrdinalTask(ClassTask):
    """A cumulative link model: P(class > k) = sigmoid(logit − θₖ), with learnt θ₁ < θ₂ < ...

    The slide has one place on an axis that the thresholds cut into the classes, so that a grade between two others is
    never less probable than both because of how the classes were trained one by one.
    """

    scores = ORDINAL_SCORES

    def __init__(
        self,
        classes: Sequence[str],
        class_weights: Sequence[float] | Literal["balanced"] | None = None,
        column: str | None = None,
    ) -> None:
        """Build the task.

        Args:
            classes: The labels as the manifest writes them, from the lowest to the highest.
            class_weights: Weight of each class in the loss; balanced weighs by how rare it is among the training
                slides.
            column: Column of the manifest with the label; `label` by default.
        """
        super().__init__(classes, 1, column)
        self.weights = ClassWeights(class_weights, len(self.classes))
        steps = len(self.classes) - 1
        self.first = nn.Parameter(torch.tensor([-(steps - 1) / 2]))  # thresholds one apart, around 0
        self.gaps = nn.Parameter(torch.full((steps - 1,), 0.5413))  # softplus(0.5413) = 1

    @property
    def thresholds(self) -> Tensor:
        """(classes − 1,) in rising order."""
        return torch.cat([self.first, self.first + functional.softplus(self.gaps).cumsum(0)])

    def prepare(self, targets: Tensor) -> None:
        self.weights.balance(torch.bincount(targets, minlength=len(self.classes)))

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The (N, classes) logarithms of the probabilities.

        With a = logit − θₖ and b = logit − θₖ₊₁ a class has σ(a) − σ(b) = σ(a) σ(−b) (1 − e^(b−a)), which does not
        cancel where both are near 1.
        """
        thresholds = self.thresholds.to(logits.dtype)
        above = functional.logsigmoid(logits - thresholds)  # log P(class > k)
        below = functional.logsigmoid(thresholds - logits)  # log P(class <= k)
        between = above[:, :-1] + below[:, 1:] + torch.log(-torch.expm1(thresholds[:-1] - thresholds[1:]))
        return torch.cat([below[:, :1], between, above[:, -1:]], dim=1)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        losses = functional.nll_loss(
            self.log_probabilities(logits), target, weight=self.weights(logits), reduction="none"
        )
        return losses.mean()

    def probabilities(self, logits: Tensor) -> Tensor:
        return self.log_probabilities(logits).exp()


class RegressionTask(Task):
    """One number, which the network learns in units of the training slides' mean and standard deviation."""

    scores = VALUE_SCORES
    names = ("value",)
    outputs = 1

    def __init__(self, column: str = "label", loss: Literal["squared", "huber", "absolute"] = "squared") -> None:
        """Build the task.

        Args:
            column: Column of the manifest with the number.
            loss: The distance that is made small, in standard deviations of the training slides: squared, absolute,
                or huber, which is squared up to one standard deviation and absolute beyond.
        """
        super().__init__()
        self.columns = (column,)
        self.distance = loss
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.centre: Tensor
        self.scale: Tensor

    def target(self, cells: Cells) -> Tensor:
        return torch.tensor([number(cells, self.columns[0])])

    def stratum(self, cells: Cells) -> str:
        return ""

    def prepare(self, targets: Tensor) -> None:
        spread = float(targets.double().std(correction=0)) if len(targets) > 1 else 0.0
        self.centre.fill_(float(targets.double().mean()))
        self.scale.fill_(spread or 1.0)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        truth = (target.to(logits.dtype) - self.centre.to(logits.dtype)) / self.scale.to(logits.dtype)
        if self.distance == "squared":
            return functional.mse_loss(logits[:, 0], truth)
        if self.distance == "absolute":
            return functional.l1_loss(logits[:, 0], truth)
        return functional.huber_loss(logits[:, 0], truth)

    def predict(self, logits: Tensor) -> Tensor:
        return logits * self.scale.to(logits.dtype) + self.centre.to(logits.dtype)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> ValuePredictions:
        return ValuePredictions(owners.slides, owners.patients, targets, predicted[:, 0], owners.sites)


class SurvivalTask(Task):
    """Base of the survival tasks: the columns of time and event, and a risk as prediction."""

    scores = RISK_SCORES
    names: tuple[str, ...] = ("risk",)
    entries = 2

    def __init__(self, time: str, event: str) -> None:
        super().__init__()
        self.columns = (time, event)

    def target(self, cells: Cells) -> Tensor:
        """(1, 2): time and event."""
        time, event = self.columns
        months = number(cells, time)
        if months < 0:
            raise UserError(f"has {time} {cells[time]!r}; a time cannot be negative")
        return torch.tensor([[months, float(yes_or_no(cells, event))]])

    def lack(self, targets: Tensor) -> str | None:
        return None if targets[:, 1].any() else "no slide with an event"

    def stratum(self, cells: Cells) -> str:
        return f"event {yes_or_no(cells, self.columns[1]):d}"

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> RiskPredictions:
        times, events = targets[:, 0], targets[:, 1] == 1
        return RiskPredictions(owners.slides, owners.patients, times, events, predicted[:, 0], owners.sites)


class CoxTask(SurvivalTask):
    """Cox's proportional hazards, a slide at a time: the logit is the logarithm of the relative risk.

    The partial likelihood compares the risks of all slides, and a step sees one. So the risks of the last `memory`
    training slides are remembered as numbers, and the loss of a slide is the negative log partial likelihood of the
    slides remembered and this one, divided by their events. Its gradient is with respect to this slide's risk alone;
    the others are constants, computed by the weights of their own step. It is what a batch would give only as far as
    the weights have not moved since, and a slide does not hear of those after it until it comes again. `HazardTask`
    needs no other slide and is exact for every batch size; take Cox where proportional hazards are the question.
    """

    outputs = 1

    def __init__(self, time: str = "time", event: str = "event", memory: int = 64) -> None:
        """Build the task.

        Args:
            time: Column of the manifest with the time of the event, or of the last visit without one.
            event: Column with 1 where the event happened, 0 where it was not seen.
            memory: Training slides whose risks are remembered; about as many as are accumulated for a step or more.
        """
        super().__init__(time, event)
        if memory < 1:
            raise ValueError(f"memory is {memory}; a risk is compared with at least 1 other slide's")
        self.register_buffer("remembered", torch.zeros(memory, 3))  # risk, time, event
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))
        self.remembered: Tensor
        self.filled: Tensor

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        past = self.remembered[: int(self.filled)].clone()  # the memory moves on before backward
        risks = torch.cat([logits[:, 0], past[:, 0].to(logits)])
        times = torch.cat([target[:, 0].to(logits), past[:, 1].to(logits)])
        events = torch.cat([target[:, 1].to(logits), past[:, 2].to(logits)])
        if self.training:
            self._remember(logits, target)
        return partial_likelihood(risks, times, events)

    @torch.no_grad()
    def _remember(self, logits: Tensor, target: Tensor) -> None:
        newest = torch.cat([logits.detach(), target.to(logits)], dim=1).to(self.remembered)
        size = len(self.remembered)
        self.remembered.copy_(torch.cat([newest, self.remembered])[:size])
        self.filled.add_(len(newest)).clamp_(max=size)

    def predict(self, logits: Tensor) -> Tensor:
        return logits


def partial_likelihood(risks: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """The negative log partial likelihood for each event, ties by Breslow; 0 where no event happened."""
    at_risk = times[None, :] >= times[:, None]  # of row i: who was still there when it happened
    totals = torch.where(at_risk, risks[None, :], float("-inf")).logsumexp(dim=1)
    return ((totals - risks) * events).sum() / events.sum().clamp(min=1)


class HazardTask(SurvivalTask):
    """Discrete-time hazards: one logit for each interval, the probability of the event in it after none before.

    The likelihood of a slide needs no other slide, so it is exact with one slide a step. A slide with an event
    contributes the hazard of its interval and the survival of those before; one without has survived the intervals
    that ended before it was last seen. The last interval has no end. The risk, by which slides are ordered, is minus
    the expected number of intervals survived.
    """

    def __init__(
        self,
        time: str = "time",
        event: str = "event",
        intervals: int = 4,
        ends: Sequence[float] | None = None,
    ) -> None:
        """Build the task.

        Args:
            time: Column of the manifest with the time of the event, or of the last visit without one.
            event: Column with 1 where the event happened, 0 where it was not seen.
            intervals: How many; their ends are quantiles of the training slides' times of events.
            ends: The ends of all intervals but the last, in the unit of `time`, instead of `intervals`.
        """
        super().__init__(time, event)
        if ends is not None and (not ends or list(ends) != sorted(set(ends)) or ends[0] <= 0):
            raise ValueError(f"ends is {list(ends)}; give rising times above 0")
        if ends is None and intervals < 2:
            raise ValueError(f"intervals is {intervals}; a survival curve has at least 2")
        self.outputs = intervals if ends is None else len(ends) + 1
        self.given = ends is not None
        # Until the training slides are known: unit steps, so that a plan and a forward need no data.
        values = torch.arange(1.0, intervals) if ends is None else torch.tensor([float(end) for end in ends])
        self.register_buffer("ends", values.double())
        self.ends: Tensor
        self.names = ("risk", *(f"survival_{index + 1}" for index in range(self.outputs)))

    def prepare(self, targets: Tensor) -> None:
        if self.given:
            return
        times = targets[targets[:, 1] == 1, 0].double()
        shares = torch.arange(1, self.outputs, dtype=torch.float64) / self.outputs
        ends = torch.quantile(times, shares) if len(times) else self.ends.cpu()
        if len(ends.unique()) < len(ends) or ends[0] <= 0:
            raise ValueError(
                f"{len(times)} training slides with an event do not make {self.outputs} intervals; give fewer "
                "(model.task.init_args.intervals) or their ends"
            )
        self.ends.copy_(ends)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        times, events = target[:, 0].to(self.ends), target[:, 1].to(logits.dtype)
        # Interval k is (end of k−1, end of k]: an event at its end lies in it, a visit at its end has survived it.
        interval = torch.searchsorted(self.ends, times, right=False)
        survived = torch.searchsorted(self.ends, times, right=True)
        happened = events[:, None] * functional.one_hot(interval, self.outputs).to(logits.dtype)
        before = torch.where(events > 0, interval, survived)
        through = (torch.arange(self.outputs, device=logits.device) < before[:, None]).to(logits.dtype)
        terms = happened * functional.logsigmoid(logits) + through * functional.logsigmoid(-logits)
        return -terms.sum(dim=1).mean()

    def predict(self, logits: Tensor) -> Tensor:
        """The risk, then the probability to survive each interval."""
        survival = functional.logsigmoid(-logits).cumsum(dim=1).exp()
        return torch.cat([-survival.sum(dim=1, keepdim=True), survival], dim=1)
