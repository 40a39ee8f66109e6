"""What predictions of classes have in common, whether classes exclude each other or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.table import owners_of_rows


@dataclass(frozen=True)
class ClassRows:
    """Labels and predicted probabilities of classes, one row for each slide (or each patient)."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    labels: NDArray[Any]
    probabilities: NDArray[np.float64]
    """(rows, classes), each in 0..1."""
    sites: tuple[str, ...] = ()
    """Where each slide comes from; empty where the manifest does not say."""

    def __len__(self) -> int:
        return len(self.slides)

    @property
    def truth(self) -> NDArray[Any]:
        """What is true of each row: the labels."""
        return self.labels

    def take(self, rows: NDArray[np.int64]) -> Self:
        """The rows with these indices, in this order, repeats included."""
        owners = owners_of_rows(self, rows)
        return replace(self, **owners, labels=self.labels[rows], probabilities=self.probabilities[rows])
