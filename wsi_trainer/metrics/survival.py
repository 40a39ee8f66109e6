"""Survival by risk: baseline of the training patients, hazard ratio, time-dependent AUC and integrated Brier score.

All are of independent rows, that is, of patients. Censoring is weighed by its own Kaplan-Meier curve, and assumed to be
independent of the risk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.intervals import LEAST, Interval, Z, resamples, too_few
from wsi_trainer.metrics.table import Predictions, PredictionsError
from wsi_trainer.metrics.values import RiskPredictions, kaplan_meier, log_rank

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
STEPS = 50
LEAST_EVENTS = 10
"""Patients with an event in each group from which on a hazard ratio has an interval."""
GRID = 50
"""Times at which the Brier score is computed, between the 5th and the 95th percentile of times of events."""


@dataclass(frozen=True)
class Baseline:
    """Risks of the training patients: their median, and the survival that goes with each risk (Breslow)."""

    median: float
    """Of the risks: a patient above it is of higher risk."""
    slope: float
    """Log hazard for each unit of risk, as the training patients have it (Cox)."""
    times: tuple[float, ...]
    """Of events."""
    hazard: tuple[float, ...]
    """Cumulative hazard of a patient with the median risk after each of them."""

    @classmethod
    def of(cls, training: RiskPredictions) -> Self:
        """The baseline of training patients."""
        median = float(np.median(training.risks))
        slope, _ = cox(training.times, training.events, training.risks)
        slope = slope if np.isfinite(slope) else 1.0
        relative = np.exp(slope * (training.risks - median))
        times = np.unique(training.times[training.events])
        steps = [
            float((training.events & (training.times == time)).sum() / relative[training.times >= time].sum())
            for time in times
        ]
        return cls(median, slope, tuple(times.tolist()), tuple(np.cumsum(steps).tolist()))

    @classmethod
    def mean(cls, several: Sequence[Self]) -> Self:
        """The baseline of the mean of `relative` risks of several models: that of the mean of their hazards."""
        times = np.unique(np.concatenate([one.times for one in several]))
        hazards = [np.append(0.0, one.hazard)[np.searchsorted(one.times, times, "right")] for one in several]
        return cls(0.0, 1.0, tuple(times.tolist()), tuple(np.mean(hazards, axis=0).tolist()))

    def relative(self, risks: Floats) -> Floats:
        """The log hazards of risks beside that of the median risk: of several models on one scale."""
        return self.slope * (risks - self.median)

    def survival(self, risks: Floats, times: Floats) -> Floats:
        """(rows, times) probability that each patient has no event until each time."""
        place = np.searchsorted(np.array(self.times), times, "right")
        hazard = np.append(0.0, self.hazard)[place]
        return np.asarray(np.exp(-np.exp(self.relative(risks))[:, None] * hazard))

    def record(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {"median": self.median, "slope": self.slope, "times": list(self.times), "hazard": list(self.hazard)}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """A baseline from its fields."""
        times, hazard = (tuple(map(float, record[name])) for name in ("times", "hazard"))
        return cls(float(record["median"]), float(record["slope"]), times, hazard)


def cox(times: Floats, events: Bools, x: Floats) -> tuple[float, float]:
    """The log hazard ratio of one covariate by Cox's regression with Efron's ties, and its standard error; NaN where
    there is no maximum.
    """
    value, nothing = 0.0, (float("nan"), float("nan"))
    if not events.any() or np.ptp(x) == 0:
        return nothing
    scale = float(x.std())
    x = (x - x.mean()) / scale
    groups = [(times >= time, events & (times == time)) for time in np.unique(times[events])]
    for _ in range(STEPS):
        first = second = 0.0
        weights = np.exp(np.clip(value * x, -50, 50))
        for at_risk, failed in groups:
            sums = np.array([(weights * x**power)[at_risk].sum() for power in (0, 1, 2)])
            own = np.array([(weights * x**power)[failed].sum() for power in (0, 1, 2)])
            count = int(failed.sum())
            shares = np.arange(count) / count
            total, mean, square = sums[:, None] - shares * own[:, None]
            first += x[failed].sum() - (mean / total).sum()
            second += (square / total - (mean / total) ** 2).sum()
        if second < 1e-9 or abs(value) > 20:
            return nothing
        step = float(np.clip(first / second, -2, 2))
        value += step
        if abs(step) < 1e-10:
            return value / scale, float(1 / np.sqrt(second)) / scale
    return nothing


def hazard_ratio(predictions: RiskPredictions, high: Bools) -> Interval:
    """The hazard of patients of higher risk over that of the others, with Wald's interval of its logarithm."""
    value, error = cox(predictions.times, predictions.events, high.astype(float))
    happened = [int((predictions.events & rows).sum()) for rows in (high, ~high)]
    nan, patients, events = float("nan"), len(predictions), int(predictions.events.sum())
    if min(happened) < LEAST_EVENTS or np.isnan(value):
        why = f"no interval: {min(happened)} events in a group, of {LEAST_EVENTS} needed"
        return Interval(float(np.exp(value)), nan, nan, 0, patients, events, why)
    low, middle, upper = np.exp([value - Z * error, value, value + Z * error]).tolist()
    return Interval(middle, low, upper, 0, patients, events)


def _uncensored(times: Floats, events: Bools, at: Floats, before: bool = True) -> Floats:
    """The probability of not being censored until just before each time, or until it (Kaplan-Meier of censoring)."""
    points = np.unique(times[~events])
    # An event at a time of censoring came first: who has it then is no more at risk of being censored.
    lost = np.array([float((~events & (times == time)).sum()) for time in points])
    at_risk = np.array([float(((times > time) | (~events & (times == time))).sum()) for time in points])
    steps = np.append(1.0, np.cumprod(1 - lost / np.maximum(at_risk, 1)))
    return np.asarray(steps[np.searchsorted(points, at, "left" if before else "right")])


def dynamic_auc(predictions: RiskPredictions, time: float) -> float:
    """Of pairs of a patient with an event until a time and one without any until then, the share in which the first
    has the higher risk (cumulative and dynamic, Uno 2007; Hung and Chiang 2010); ties count half. NaN without pairs.
    """
    case = predictions.events & (predictions.times <= time)
    control = predictions.times > time
    if not case.any() or not control.any():
        return float("nan")
    weights = 1 / _uncensored(predictions.times, predictions.events, predictions.times[case])
    ordered = np.sort(predictions.risks[control])
    risks = predictions.risks[case]
    below = (np.searchsorted(ordered, risks, "left") + np.searchsorted(ordered, risks, "right")) / (2 * len(ordered))
    return float((weights * below).sum() / weights.sum())


def brier_at(predictions: RiskPredictions, survival: Floats, at: Floats) -> Floats:
    """The Brier score at each time, censoring weighed (Graf et al. 1999).

    Args:
        predictions: The patients.
        survival: (rows, times) their predicted probability of no event until each time.
        at: The times.
    """
    times, events = predictions.times[:, None], predictions.events[:, None]
    own = _uncensored(predictions.times, predictions.events, predictions.times)[:, None]
    then = _uncensored(predictions.times, predictions.events, at, before=False)
    with np.errstate(divide="ignore", invalid="ignore"):
        happened = np.where(events & (times <= at), survival**2 / own, 0.0)
        free = np.where(times > at, (1 - survival) ** 2 / then, 0.0)
    return np.asarray((happened + free).mean(axis=0))


def grid_of(predictions: RiskPredictions) -> Floats:
    """Times over which the Brier score is integrated."""
    happened = predictions.times[predictions.events]
    if len(happened) < 2:
        return np.zeros(0)
    first, last = np.quantile(happened, [0.05, 0.95]).tolist()
    return np.linspace(first, last, GRID)


def integrated_brier(predictions: RiskPredictions, survival: Floats, at: Floats) -> float:
    """The mean Brier score over times; NaN where there are fewer than two."""
    if len(at) < 2 or at[-1] <= at[0]:
        return float("nan")
    return float(np.trapezoid(brier_at(predictions, survival, at), at) / (at[-1] - at[0]))


def quarters(predictions: RiskPredictions) -> list[float]:
    """The quartiles of the times of events, at which AUCs are computed."""
    happened = predictions.times[predictions.events]
    return np.quantile(happened, [0.25, 0.5, 0.75]).tolist() if len(happened) else []


def of_survival(patients: RiskPredictions, baseline: Baseline | None = None, count: int = 400) -> dict[str, Any]:
    """Measures of patients by risk, as JSON.

    Args:
        patients: One row for each, with the cut that training gives.
        baseline: Of the training patients; without it no survival is predicted.
        count: Resamples of patients.

    Returns:
        `auc_at` (by time); with a cut `higher` and `lower` (patients and events), `hazard_ratio` and `log_rank_p`; with
        a baseline `integrated_brier` and `integrated_brier_without_risk` (that of Kaplan-Meier's curve of all).
    """
    found: dict[str, Any] = {"patients": len(patients), "events": int(patients.events.sum())}
    found["auc_at"] = {
        f"{time:.3g}": resampled_interval(patients, partial(dynamic_auc, time=time), count).to_dict()
        for time in quarters(patients)
    }
    if (high := patients.higher) is not None:
        for name, rows in (("higher", high), ("lower", ~high)):
            found[name] = {"patients": int(rows.sum()), "events": int((patients.events & rows).sum())}
        found["hazard_ratio"] = hazard_ratio(patients, high).to_dict()
        p = float("nan") if too_few(patients) else log_rank(patients.times, patients.events, high)
        found["log_rank_p"] = None if np.isnan(p) else p
    if baseline is not None:
        at = grid_of(patients)
        score = partial(_brier_of, baseline=baseline, at=at)
        found["integrated_brier"] = resampled_interval(patients, score, count).to_dict()
        steps, shares = kaplan_meier(patients.times, patients.events)
        everybody = np.tile(shares[np.searchsorted(steps, at, "right") - 1], (len(patients), 1))
        found["integrated_brier_without_risk"] = integrated_brier(patients, everybody, at)
    return found


def survivals(predictions: Predictions, baselines: Mapping[str, Baseline]) -> dict[str, Any]:
    """`of_survival` of the patients of each target that is a survival, by its name; without patients that contradict
    themselves.
    """
    found = {}
    for name, part in predictions.by_target.items():
        if part.KIND == RiskPredictions.KIND and len(part):
            try:
                patients: Any = part.by_patient()
            except PredictionsError:
                continue
            found[name] = of_survival(patients, baselines.get(name))
    return found


def _brier_of(patients: RiskPredictions, baseline: Baseline, at: Floats) -> float:
    return integrated_brier(patients, baseline.survival(patients.risks, at), at)


def resampled_interval(patients: RiskPredictions, score: Any, count: int) -> Interval:
    """A score with the bounds of 95 % of resampled patients, or why there is none."""
    value, nan, events = score(patients), float("nan"), int(patients.events.sum())
    if min(events, len(patients) - events) < LEAST or np.isnan(value):
        why = f"no interval: {min(events, len(patients) - events)} patients with or without event, of {LEAST} needed"
        return Interval(value, nan, nan, 0, len(patients), events, why)
    drawn = np.array([score(patients.take(rows)) for rows in resamples(patients.patients, count, 0)])
    known = drawn[np.isfinite(drawn)]
    if len(known) < 0.9 * count:
        why = f"no interval: defined on {len(known)} of {count} resamples"
        return Interval(value, nan, nan, len(known), len(patients), events, why)
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return Interval(value, min(low, value), max(high, value), len(known), len(patients), events)
