"""Confidence intervals by bootstrap: patients are drawn with replacement, and bring all their slides with
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.scores import Score
from wsi_trainer.metrics.table import AnyRows, PredictionsError, Rows, aligned, rows_of_patients


@dataclass(frozen=True)
class Interval:
    """A value and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float
    resamples: int
    """Resamples on which the score was defined (a resample with one class has no AUC)."""

    def excludes(self, number: float) -> bool:
        """Whether the interval lies wholly on one side of the number."""
        return self.low > number or self.high < number

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def to_dict(self) -> dict[str, float]:
        """The fields by name, for JSON."""
        return asdict(self)


def resamples(patients: Sequence[str], count: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Row indices of `count` resamples of the patients."""
    rows = list(rows_of_patients(patients).values())
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield np.concatenate([rows[i] for i in generator.integers(0, len(rows), len(rows))])


def score_intervals(
    predictions: Rows, scores: Mapping[str, Score], count: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """Each score of predictions of any kind with its 95 % interval, all from the same resamples."""
    drawn: dict[str, list[float]] = {name: [] for name in scores}
    for rows in resamples(predictions.patients, count, seed):
        resample = predictions.take(rows)
        for name, score in scores.items():
            drawn[name].append(score(resample))
    return {name: _interval(score(predictions), drawn[name]) for name, score in scores.items()}


def paired_difference(first: AnyRows, second: AnyRows, score: Score, count: int = 2000, seed: int = 0) -> Interval:
    """The score of the first minus that of the second, both on the same slides and the same resamples.

    Pairing cancels what makes a slide hard for both, so the interval is narrower than two separate ones
    suggest.
    """
    second = aligned(second, first.slides)
    if not np.array_equal(first.truth, second.truth, equal_nan=True):
        raise PredictionsError(
            "the two sets of predictions have different labels for the same slides; compare like with like"
        )
    drawn = [score(first.take(rows)) - score(second.take(rows)) for rows in resamples(first.patients, count, seed)]
    return _interval(score(first) - score(second), drawn)


def _interval(value: float, drawn: Sequence[float]) -> Interval:
    defined = np.array([number for number in drawn if np.isfinite(number)])
    if defined.size == 0:
        return Interval(value, float("nan"), float("nan"), 0)
    low, high = np.quantile(defined, [0.025, 0.975])
    return Interval(value, float(low), float(high), int(defined.size))
