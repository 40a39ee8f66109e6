"""Predictions of a number and of a risk, their scores, and the survival of groups."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.decision import Decision
from wsi_trainer.metrics.table import Predictions, PredictionsError, Score, Table, Words


def mean_absolute_error(predictions: ValuePredictions) -> float:
    """The mean distance of the value from the target."""
    return float(np.abs(predictions.values - predictions.targets).mean())


def root_mean_squared_error(predictions: ValuePredictions) -> float:
    """The root of the mean squared distance."""
    return float(np.sqrt(((predictions.values - predictions.targets) ** 2).mean()))


def r2(predictions: ValuePredictions) -> float:
    """The share of the targets' variance that the values explain; negative where their mean would explain more."""
    spread = ((predictions.targets - predictions.targets.mean()) ** 2).sum()
    if not spread:
        return float("nan")
    return float(1 - ((predictions.values - predictions.targets) ** 2).sum() / spread)


def pearson(predictions: ValuePredictions) -> float:
    """Correlation of values and targets."""
    return _correlation(predictions.values, predictions.targets)


def spearman(predictions: ValuePredictions) -> float:
    """Correlation of their ranks."""
    from scipy.stats import rankdata  # slow to import

    return _correlation(rankdata(predictions.values), rankdata(predictions.targets))


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    first, second = first - first.mean(), second - second.mean()
    norm = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / norm) if norm else float("nan")


VALUE_SCORES: Mapping[str, Score] = {
    "r2": r2,
    "pearson": pearson,
    "spearman": spearman,
    "mean_absolute_error": mean_absolute_error,
    "root_mean_squared_error": root_mean_squared_error,
}


@dataclass(frozen=True, repr=False)
class ValuePredictions(Predictions):
    """A number and its prediction, one row for each slide (or each patient)."""

    KIND = "number"
    COLUMNS: ClassVar = {"targets": "target", "values": "value"}
    SCORES = VALUE_SCORES
    ERROR = "distance of the predicted number from the true one"
    FIGURES = ("scatter",)

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    targets: NDArray[np.float64]
    """(rows,) numbers of the manifest."""
    values: NDArray[np.float64]
    """(rows,) numbers of the model."""
    sites: tuple[str, ...] = ()

    @property
    def known(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.targets)

    def of_patient(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """The means over the slides."""
        return {"targets": self.targets[rows].mean(), "values": self.values[rows].mean()}

    def errors(self) -> NDArray[np.float64]:
        return np.abs(self.values - self.targets)

    def words(self, row: int) -> Words:
        return Words(f"{self.targets[row]:.4g}" if self.known[row] else "", f"{self.values[row]:.4g}")


def c_index(predictions: RiskPredictions) -> float:
    """Harrell's C: of the pairs in which one is known to have had the event first, those where it has the higher risk.

    A tie in risk counts half. NaN where no pair can be compared.
    """
    times, events, risks = predictions.times, predictions.events, predictions.risks
    earlier = times[:, None] < times
    # An event at the very time at which the other one was last seen without it came first.
    earlier |= (times[:, None] == times) & ~events
    comparable = earlier & events[:, None]
    pairs = int(comparable.sum())
    if not pairs:
        return float("nan")
    higher = (risks[:, None] > risks) + 0.5 * (risks[:, None] == risks)
    return float(higher[comparable].sum() / pairs)


RISK_SCORES: Mapping[str, Score] = {"c_index": c_index}


@dataclass(frozen=True, repr=False)
class RiskPredictions(Predictions):
    """Time, event and predicted risk, one row for each slide (or each patient)."""

    KIND = "risk"
    COLUMNS: ClassVar = {"times": "time", "events": "event", "risks": "risk"}
    SCORES = RISK_SCORES
    ERROR = "share of the slides it can be compared with that are ordered wrongly"
    POSITIVE = "with event"
    FIGURES = ("survival",)

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    times: NDArray[np.float64]
    """(rows,) time of the event, or the last time it was known not to have happened."""
    events: NDArray[np.bool_]
    """(rows,) whether it happened."""
    risks: NDArray[np.float64]
    """(rows,) the higher, the earlier the event is expected."""
    sites: tuple[str, ...] = ()
    cuts: NDArray[np.float64] | None = None
    """(rows,) risk above which a patient is of higher risk: the median of the training patients; None if not known."""

    @property
    def higher(self) -> NDArray[np.bool_] | None:
        """(rows,) whether the risk is above that of half of the training patients; None where that is not known."""
        return None if self.cuts is None else self.risks > self.cuts

    def decided_by(self, decision: Decision) -> Self:
        return replace(self, cuts=np.full(len(self), decision.thresholds[0]) if decision.thresholds else None)

    def declaration(self) -> dict[str, Any]:
        (own,) = super().declaration().values()
        cuts = [] if self.cuts is None else np.unique(self.cuts).tolist()
        return {self.TARGET: own | ({"thresholds": cuts} if len(cuts) == 1 else {})}

    @property
    def truth(self) -> NDArray[np.float64]:
        """Times and events."""
        return np.stack([self.times, self.events], axis=1)

    @property
    def known(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.times)

    def of_patient(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """The highest risk of the slides, which have to agree on time and event."""
        if len(set(zip(self.times[rows].tolist(), self.events[rows].tolist(), strict=True))) > 1:
            raise PredictionsError(f"the slides of patient {self.patients[rows[0]]} have different times or events")
        return {"risks": self.risks[rows].max()}

    def errors(self) -> NDArray[np.float64]:
        first = (self.times[:, None] < self.times) & self.events[:, None]
        reversed_ = first & (self.risks[:, None] < self.risks)
        compared = first.sum(axis=0) + first.sum(axis=1)
        return np.asarray((reversed_.sum(axis=0) + reversed_.sum(axis=1)) / np.maximum(compared, 1))

    def words(self, row: int) -> Words:
        happened = "event at" if self.events[row] else "no event until"
        label = f"{happened} {self.times[row]:g}" if self.known[row] else ""
        return Words(label, f"risk {self.risks[row]:.3g}")

    def groups(self) -> list[NDArray[np.bool_]]:
        return [self.events]

    @property
    def positives(self) -> NDArray[np.bool_]:
        return self.events

    @classmethod
    def of_table(cls, table: Table, classes: Sequence[str] = ()) -> Self:
        found = super().of_table(table, classes)
        return replace(found, events=found.events == 1)


def kaplan_meier(times: NDArray[np.float64], events: NDArray[np.bool_]) -> tuple[Any, Any]:
    """The times of events, from 0 on, and the share of independent patients without event after each."""
    from scipy.stats import CensoredData, ecdf  # slow to import

    curve = ecdf(CensoredData.right_censored(times, ~events)).sf
    happened = np.isin(curve.quantiles, times[events])
    return np.append(0.0, curve.quantiles[happened]), np.append(1.0, curve.probabilities[happened])


def kaplan_meier_band(times: NDArray[np.float64], events: NDArray[np.bool_]) -> tuple[Any, Any]:
    """The lower and the upper bound of 95 % of the curve of `kaplan_meier` at its times, by Greenwood's variance of
    log(-log S); NaN where that is not defined, as before the first event and where nobody is left.
    """
    from scipy.stats import CensoredData, ecdf  # slow to import

    curve = ecdf(CensoredData.right_censored(times, ~events)).sf
    happened = np.isin(curve.quantiles, times[events])
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where the bounds are not defined
        both = curve.confidence_interval(0.95, method="log-log")
    low, high = (np.append(np.nan, one.probabilities[happened]) for one in (both.low, both.high))
    return low, high


def log_rank(times: NDArray[np.float64], events: NDArray[np.bool_], group: NDArray[np.bool_]) -> float:
    """p of the log-rank test of a group against the others; NaN where no event can tell them apart."""
    from scipy.stats import CensoredData, logrank  # slow to import

    one, other = (CensoredData.right_censored(times[rows], ~events[rows]) for rows in (group, ~group))
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(logrank(one, other).pvalue)
