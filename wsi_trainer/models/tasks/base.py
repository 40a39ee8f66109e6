"""What every task says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import Predictions, Score

Cells = Mapping[str, str]
"""One line of the manifest: its cells by column."""


@dataclass(frozen=True)
class Owners:
    """Whose predictions they are, row by row."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    sites: tuple[str, ...] = ()


class Task(nn.Module):
    """From the numbers of the last layer to a loss and a prediction.

    Attributes:
        dense: Whether it has a target for each pixel, which is drawn, instead of one for the slide.
        outputs: Numbers of the last layer.
        columns: Columns of the manifest that hold the target.
        may_be_empty: Whether a cell of these may be empty.
        names: What a prediction's numbers are called.
        classes: Names of the classes, where there are any.
        scores: The scores of its predictions, by name.
    """

    dense = False
    outputs: int
    columns: tuple[str, ...] = ("label",)
    may_be_empty = False
    names: tuple[str, ...]
    classes: tuple[str, ...] = ()
    scores: Mapping[str, Score]

    def target(self, cells: Cells) -> Tensor:
        """The target of one slide, with a leading dimension of 1; an error says which cell is wrong and how."""
        raise NotImplementedError

    def stratum(self, cells: Cells) -> str:
        """What is kept in proportion when slides are split."""
        raise NotImplementedError

    def marks(self, cells: Cells) -> tuple[str, ...]:
        """The labels that apply, where they do not exclude each other: each is then kept in proportion."""
        return ()

    def prepare(self, targets: Tensor) -> None:
        """Learn what has to be known of the training slides' targets, before the first step."""

    def lack(self, targets: Tensor) -> str | None:
        """Why nothing can be learnt from these targets, nor scored on them; None where it can."""
        return None

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean loss of (N, outputs) logits."""
        raise NotImplementedError

    def predict(self, logits: Tensor) -> Tensor:
        """The (N, len(names)) predictions of (N, outputs) logits."""
        raise NotImplementedError

    def predictions(self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]) -> Predictions:
        """Targets and predictions as what scores are computed of."""
        raise NotImplementedError


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; an error where they name no choice."""
    if len(set(classes)) != len(classes) or len(classes) < 2:
        raise ValueError(f"classes is {list(classes)}; give at least two different names")
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
