"""What predictions of classes have in common, whether classes exclude each other or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


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

    def take(self, rows: NDArray[np.int64]) -> Self:
        """The rows with these indices, in this order, repeats included."""
        return replace(
            self,
            slides=tuple(self.slides[i] for i in rows),
            patients=tuple(self.patients[i] for i in rows),
            labels=self.labels[rows],
            probabilities=self.probabilities[rows],
            sites=tuple(self.sites[i] for i in rows) if self.sites else (),
        )
