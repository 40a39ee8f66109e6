"""`MultiTargetTask`: several targets of the same slides, learnt by one network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import MultiTargetPredictions, prefixes, scores_by_target
from wsi_trainer.models.tasks import Cells, Owners, SlidePart, Targets, Task

_NAME = re.compile(r"[\w-]+")


class MultiTargetTask(Task):
    """A task for each of several targets, by its name. Of a slide some targets may be unknown: their cells are empty.

    The loss is the weighted sum over the known targets. Targets of slides share the head and the last layer, of whose
    rows each has its own. A target of pixels comes first and has a last layer of its own.
    """

    may_be_empty = True

    def __init__(self, targets: Mapping[str, Task], weights: Mapping[str, float] | None = None) -> None:
        """Build the task.

        Args:
            targets: The task of each target. The first is the main one, whose scores have no prefix.
            weights: Factors of the losses; by default each is 1.
        """
        super().__init__()
        for name in targets:
            if not _NAME.fullmatch(name):
                raise ValueError(f"targets names {name!r}; names are of letters, digits, _ and -")
        given = dict(weights or {})
        for name, weight in given.items():
            if name not in targets:
                raise ValueError(f"target_weights names {name!r}; the targets are {', '.join(targets)}")
            if not (isfinite(weight) and weight > 0):
                raise ValueError(f"target_weights: {name} is {weight}; it must be positive")
        dense = [name for name, task in targets.items() if task.dense]
        if len(dense) > 1 or dense != list(targets)[: len(dense)]:
            raise ValueError(f"targets: {dense[-1]} has a class for each pixel; one of these may come, as the first")
        if any(len(task.by_target) > 1 for task in targets.values()):
            raise ValueError("targets: a target is one task, not several")
        self._names, self.tasks = tuple(targets), nn.ModuleList(targets.values())
        self.weights = {name: float(given.get(name, 1.0)) for name in targets}
        self.dense = bool(dense)
        self.columns = tuple(dict.fromkeys(column for task in targets.values() for column in task.columns))
        before = prefixes({name: task.names for name, task in targets.items()})
        self.names = tuple(before[name] + own for name, task in targets.items() for own in task.names)
        self.classes = next(iter(targets.values())).classes
        self.scores = scores_by_target({name: task.scores for name, task in targets.items()})
        self.outputs = sum(task.outputs for task in targets.values() if not task.dense)

    @property
    def by_target(self) -> Mapping[str, Task]:
        return dict(zip(self._names, cast(list[Task], list(self.tasks)), strict=True))

    @property
    def pixels(self) -> Task | None:
        first = next(iter(self.by_target.values()))
        return first if first.dense else None

    @property
    def pixel_weight(self) -> float:
        return self.weights[self._names[0]]

    @property
    def slide_parts(self) -> list[SlidePart]:
        parts, at = [], 0
        for name, task in self.by_target.items():
            if not task.dense:
                parts.append(SlidePart(name, task, slice(at, at + task.outputs)))
                at += task.outputs
        return parts

    def read(self, cells: Cells) -> dict[str, Tensor]:
        found = {name: task.target(cells) for name, task in self._known(cells)}
        if not found:
            raise UserError(f"has no label at all in the columns {', '.join(self.columns)}; fill in one")
        return found

    def _known(self, cells: Cells) -> Iterator[tuple[str, Task]]:
        """The targets that are known; that of pixels always is: nothing drawn says so."""
        for name, task in self.by_target.items():
            if task.dense or any(cells.get(column, "") for column in task.columns):
                yield name, task

    def stratum(self, cells: Cells) -> str:
        """Of a target beside pixels, and whether anything is drawn; most combinations of several are too rare."""
        if len(self.slide_parts) > 1:
            return ""
        return ", ".join([task.stratum(cells) for _, task in self._known(cells)][::-1])

    def marks(self, cells: Cells) -> tuple[str, ...]:
        """Of several targets of slides the strata of all: each is kept in proportion by itself."""
        if len(self.slide_parts) == 1:
            return tuple(mark for _, task in self._known(cells) for mark in task.marks(cells))
        return tuple(
            f"{name}: {mark}"
            for name, task in self._known(cells)
            for mark in (task.stratum(cells), *task.marks(cells))
            if mark
        )

    def row(self, targets: Targets) -> Tensor:
        return torch.cat([self._entries(name, part, targets) for name, part, _ in self.slide_parts], dim=1)

    @staticmethod
    def _entries(name: str, task: Task, targets: Targets) -> Tensor:
        if name in targets:
            return targets[name].reshape(1, -1)
        like = next(iter(targets.values()))
        return torch.full((1, task.entries), float("nan"), device=like.device)

    def loss_of(self, logits: Tensor, targets: Targets) -> Tensor:
        terms = []
        for name, task, place in self.slide_parts:
            own = logits[:, place]
            # What is not known pulls nothing, and every weight has a gradient: devices wait for each other's.
            terms.append(self.weights[name] * (task.loss(own, targets[name]) if name in targets else 0.0 * own.sum()))
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def predict(self, logits: Tensor) -> Tensor:
        """The predictions of all targets of slides, one behind the other."""
        return torch.cat([task.predict(logits[:, place]) for _, task, place in self.slide_parts], dim=1)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> MultiTargetPredictions:
        parts, label, number = {}, 0, 0
        for name, task in self.by_target.items():
            entries, width = (0, 3 * task.outputs) if task.dense else (task.entries, len(task.names))
            own = targets[:, label : label + entries]
            own = own[:, 0] if entries == 1 else own
            parts[name] = task.predictions(owners, own, predicted[:, number : number + width])
            label, number = label + entries, number + width
        return MultiTargetPredictions.of(parts)
