"""95 % intervals of scores, of differences between models, and of folds.

Patients are the unit: resamples draw patients with all their slides, and analytic intervals count patients. A score's
interval is

- AUC of two classes: the score interval of Newcombe (Statistics in Medicine 2006, method 5), right at 0 and 1 too.
  Where patients have several slides, it counts so many slides as these are worth by DeLong's variance, from ten
  patients of each class on; below, patients;
- others: bias-corrected and accelerated bootstrap (BCa; Efron 1987);
- a score of exactly 0 or 1, as 95 % of resamples have it: Wilson's interval for so many patients as the rarest group
  that the score asks for has.

Below `LEAST` patients, or `LEAST_OF_GROUP` in a group, there is none, nor where resamples are all the value and this is
neither 0 nor 1, nor where nearly all of them lie on one side of it. The calibration error never has one: it is 0 in
every second study of a calibrated model, and resamples make it larger. Calibration's intercept and slope have one. The
text says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.classes import Auc, is_biased
from wsi_trainer.metrics.delong import auc_covariance
from wsi_trainer.metrics.table import Kind, Predictions, PredictionsError, Score, join, rows_of_patients

LEAST = 10
"""Patients from which on there are intervals."""
LEAST_OF_GROUP = 3
"""Patients of each class, with an event, or with a lesion, from which on there are intervals."""
_NORMAL = NormalDist()
Z = _NORMAL.inv_cdf(0.975)
LARGER_BY_CHANCE = "no interval: resamples alone make this error larger"
_BIASED = 1.0
"""Standard deviations by which the value may lie from the median of its resamples."""


@dataclass(frozen=True)
class Interval:
    """A value and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float
    resamples: int
    """Resamples on which the score was defined (a resample with one class has no AUC); 0 where none was asked."""
    patients: int = 0
    events: int | None = None
    """Patients of the second of two classes, or with an event."""
    absent: str = ""
    """Why there is no interval; its bounds are NaN then."""

    def excludes(self, number: float) -> bool:
        """True where the interval lies wholly on one side of the number."""
        return self.low > number or self.high < number

    @property
    def bounds(self) -> str:
        """The bounds as text, or why there are none."""
        return self.absent or f"{self.low:z.3f} to {self.high:z.3f}"

    @property
    def counts(self) -> str:
        """The patients, and those with the event where there is such a thing."""
        return f"{self.patients}" if self.events is None else f"{self.events} of {self.patients}"

    def counted(self, event: str = "positive") -> str:
        """The bounds, and of whom they are.

        Args:
            event: A word for those with the event, see `Predictions.POSITIVE`.
        """
        events = "" if self.events is None else f", {self.events} of them {event}"
        if self.absent and self.patients < LEAST:  # which says how many there are
            return self.absent + events
        return f"{self.absent or '95 % interval ' + self.bounds}; {_patients(self.patients)}{events}"

    def __str__(self) -> str:
        return "not defined" if np.isnan(self.value) else f"{self.value:z.3f} ({self.bounds})"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Interval:
        """An interval from its fields; a number that JSON has as null is NaN."""
        numbers = {name: np.nan if record[name] is None else record[name] for name in ("value", "low", "high")}
        return cls(**{**record, **numbers})


def resamples(patients: Sequence[str], count: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Row indices of `count` resamples of the patients."""
    rows = list(rows_of_patients(patients).values())
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield np.concatenate([rows[i] for i in generator.integers(0, len(rows), len(rows))])


def score_intervals(
    predictions: Predictions, scores: Mapping[str, Score], count: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """Each score of predictions of any kind with its 95 % interval, those of a target from the same resamples."""
    found: dict[str, Interval] = {}
    for part, own in predictions.scored(scores):
        found |= _intervals(part, own, count, seed)
    return {name: found[name] for name in scores}


def _intervals(predictions: Predictions, scores: Mapping[str, Score], count: int, seed: int) -> dict[str, Interval]:
    if not len(predictions):
        nan = float("nan")
        return {name: Interval(nan, nan, nan, 0, absent="no interval: no slide has this label") for name in scores}
    values = {name: score(predictions) for name, score in scores.items()}
    sample = _Sample.of(predictions)
    if sample.absent:
        return {name: sample.none(value) for name, value in values.items()}
    analytic = {name for name, score in scores.items() if is_biased(score) or _positive(score, predictions) is not None}
    resampled = {name: score for name, score in scores.items() if name not in analytic}
    drawn = _each(predictions, resampled, resamples(predictions.patients, count, seed)) if resampled else {}
    left_out = _each(predictions, resampled, _without_one(predictions.patients)) if resampled else {}
    found = {}
    for name, score in scores.items():
        positive = _positive(score, predictions)
        if is_biased(score):
            found[name] = sample.none(values[name], LARGER_BY_CHANCE)
        elif positive is not None:
            found[name] = sample.of_auc(values[name], predictions, *positive)
        elif values[name] in (0, 1) and _settled(drawn[name], values[name]):
            bounds = wilson(round(values[name] * sample.rarest), sample.rarest)
            found[name] = sample.bounded(values[name], *bounds, count)
        else:
            found[name] = sample.interval(values[name], drawn[name], left_out[name])
    return found


def _positive(score: Score, predictions: Any) -> tuple[NDArray[np.bool_], NDArray[np.float64]] | None:
    """Of an AUC the rows of the class, and its probability; None of another score."""
    positive = score.positive(predictions) if isinstance(score, Auc) else None
    return None if positive is None or not isinstance(score, Auc) else (positive, score.said(predictions))


def too_few(predictions: Predictions) -> str:
    """Why a curve or a test of these predictions says nothing of others, as their intervals; empty where it does."""
    sample = _Sample.of(predictions)
    if sample.absent or sample.rarest >= LEAST_OF_GROUP:
        return sample.absent
    return few_of_group(sample.rarest, "of a class" if len(predictions.groups()) > 1 else "with an event or a lesion")


def few_of_group(patients: int, group: str = "of a class") -> str:
    """Why there can be no interval with so many patients of a group."""
    return f"no interval: {_patients(patients)} {group}, of {LEAST_OF_GROUP} needed"


def paired_difference(first: Kind, second: Kind, score: Score, count: int = 2000, seed: int = 0) -> Interval:
    """The score of the first minus that of the second, both on the same slides and the same resamples.

    Pairing cancels what makes a slide hard for both, so the interval is narrower than two separate ones suggest. Where
    the resamples of one of the two are all its score, they say nothing of its spread, and the intervals of both are
    put together (Newcombe's square-and-add, without correlation).
    """
    second = paired_rows(first, second)
    sample, value = _Sample.of(first), score(first) - score(second)
    if sample.absent or is_biased(score):
        return sample.none(value, LARGER_BY_CHANCE)
    named = {"score": score}
    rows, left = list(resamples(first.patients, count, seed)), list(_without_one(first.patients))
    drawn = [_each(one, named, rows)["score"] for one in (first, second)]
    ends = score(first), score(second)
    if any(_settled(part, end) for part, end in zip(drawn, ends, strict=True)) and first.columns() != second.columns():
        one, two = (score_intervals(predictions, named, count, seed)["score"] for predictions in (first, second))
        apart = unpaired_difference(one, two)
        if apart.absent:
            return sample.none(value, apart.absent, count)
        return sample.bounded(value, apart.low, apart.high, count)
    left_out = [_each(one, named, left)["score"] for one in (first, second)]
    return sample.interval(value, drawn[0] - drawn[1], left_out[0] - left_out[1])


def paired_rows(first: Kind, second: Kind) -> Kind:
    """The rows of the second in the order of the first; an error where slides or labels differ."""
    second = second.aligned(first.slides)
    if not np.array_equal(first.truth, second.truth, equal_nan=True):
        raise PredictionsError(
            "the two sets of predictions have different labels for the same slides; compare like with like"
        )
    return second


def unpaired_difference(first: Interval, second: Interval) -> Interval:
    """The first score minus the second, of other patients: their intervals put together (Newcombe's square-and-add)."""
    value, nan, patients = first.value - second.value, float("nan"), first.patients + second.patients
    if why := first.absent or second.absent:
        return Interval(value, nan, nan, 0, patients, absent=why)
    low = value - np.hypot(first.value - first.low, second.high - second.value)
    high = value + np.hypot(first.high - first.value, second.value - second.low)
    return Interval(value, float(low), float(high), 0, patients)


def comparison(
    first: Kind, others: Kind | Sequence[Kind], scores: Mapping[str, Score], resamples: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Every score of models on the slides that all have predicted, and paired differences of the first, as JSON.

    Returns:
        `slides` and `patients` (how many), `left_out` (the slides that one of them lacks), and `scores`: by name
        `values` (of each), `differences` (of the first from each other, `Interval.to_dict`) and `difference`, the first
        of these.

    Raises:
        PredictionsError: There is no such slide.
    """
    models: list[Kind] = [first, *(others if isinstance(others, Sequence) else [others])]
    every = [set(model.slides) for model in models]
    both = [slide for slide in first.slides if all(slide in own for own in every)]
    if not both:
        raise PredictionsError("the two have predicted no slide in common")
    one, *rest = (model.aligned(both) for model in models)
    found = {}
    for name, score in scores.items():
        apart = [paired_difference(one, other, score, resamples, seed).to_dict() for other in rest]
        found[name] = {
            "values": [score(one), *(score(other) for other in rest)], "difference": apart[0], "differences": apart,
        }  # fmt: skip
    return {
        "slides": len(one),
        "patients": len(set(one.patients)),
        "left_out": sorted(set.union(*every) - set(both)),
        "scores": found,
    }


def _each(
    predictions: Predictions, scores: Mapping[str, Score], parts: Iterable[NDArray[np.int64]]
) -> dict[str, NDArray[np.float64]]:
    """Each score of each part of the rows."""
    found = [[score(part) for score in scores.values()] for part in map(predictions.take, parts)]
    return {name: np.array([row[place] for row in found]) for place, name in enumerate(scores)}


def _without_one(patients: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    """The rows without those of one patient, for each."""
    for rows in rows_of_patients(patients).values():
        yield np.delete(np.arange(len(patients)), rows)


def _settled(drawn: NDArray[np.float64], value: float) -> bool:
    """True where 95 % of the resamples on which it is defined are the value: they say nothing of its spread."""
    known = drawn[np.isfinite(drawn)]
    return bool(len(known) and (np.abs(known - value) < 1e-12).mean() >= 0.95)


@dataclass(frozen=True)
class _Sample:
    """The patients of a set of predictions."""

    patients: int
    events: int | None
    rarest: int
    """Patients of the rarest group of which there is any."""

    @staticmethod
    def of(predictions: Predictions) -> _Sample:
        owners = np.array(predictions.patients)
        groups = [len(set(owners[rows])) for rows in predictions.groups()]
        events = None if predictions.positives is None else len(set(owners[predictions.positives]))
        total = len(set(predictions.patients))
        return _Sample(total, events, min([number for number in groups if number] or [total]))

    @property
    def absent(self) -> str:
        """Why there can be no interval."""
        return f"no interval: {_patients(self.patients)}, of {LEAST} needed" if self.patients < LEAST else ""

    def none(self, value: float, why: str = "", count: int = 0) -> Interval:
        nan = float("nan")
        return Interval(value, nan, nan, count, self.patients, self.events, self.absent or why)

    def bounded(self, value: float, low: float, high: float, count: int) -> Interval:
        return Interval(value, low, high, count, self.patients, self.events)

    def of_auc(
        self, value: float, predictions: Predictions, positive: NDArray[np.bool_], said: NDArray[np.float64]
    ) -> Interval:
        owners = np.array(predictions.patients)
        groups = len(set(owners[positive])), len(set(owners[~positive]))
        if min(groups) < LEAST_OF_GROUP:
            return self.none(value, few_of_group(min(groups)))
        counts = _counting(positive, said, owners) if min(groups) >= LEAST else groups
        return Interval(value, *auc_bounds(value, *counts), 0, self.patients, groups[0])

    def interval(self, value: float, drawn: NDArray[np.float64], left_out: NDArray[np.float64]) -> Interval:
        """BCa, from the scores of resamples and those without each patient."""
        known = np.sort(drawn[np.isfinite(drawn)])
        if not np.isfinite(value) or len(known) < 0.9 * len(drawn):
            return self.none(value, f"no interval: defined on {len(known)} of {len(drawn)} resamples", len(known))
        if _settled(known, value):
            return self.none(value, "no interval: resamples of the patients all have this value", len(known))
        below = float((known < value).mean() + (known == value).mean() / 2)
        bias = _NORMAL.inv_cdf(min(max(below, 1e-9), 1 - 1e-9))
        if abs(bias) > _BIASED:
            return self.none(value, "no interval: nearly all resamples lie on one side of it", len(known))
        rest = left_out[np.isfinite(left_out)]
        apart = rest.mean() - rest
        spread = (apart**2).sum() ** 1.5
        acceleration = (apart**3).sum() / (6 * spread) if spread else 0.0
        tails = bias + np.array([-Z, Z])
        low, high = np.quantile(known, [_NORMAL.cdf(bias + tail / (1 - acceleration * tail)) for tail in tails])
        return self.bounded(value, float(min(low, value)), float(max(high, value)), len(known))


def _counting(positive: NDArray[np.bool_], said: NDArray[np.float64], owners: NDArray[np.str_]) -> tuple[float, float]:
    """The independent slides that the slides of a class and of the others are worth: patients at least."""
    slides = np.array([positive.sum(), (~positive).sum()])
    patients = np.array([len(set(owners[positive])), len(set(owners[~positive]))])
    alone, together = (
        float(auc_covariance(positive, [said], rows)[1][0, 0]) for rows in (range(len(owners)), list(owners))
    )
    counts = slides * min(alone / together, 1.0) if together > 0 else patients
    one, other = np.clip(counts, patients, slides).tolist()
    return one, other


def _patients(count: int) -> str:
    return f"{count} patient{'' if count == 1 else 's'}"


def wilson(count: int, n: int) -> tuple[float, float]:
    """Wilson's interval of the share of n that so many of them are."""
    from scipy.stats import binomtest  # slow to import

    found = binomtest(count, n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def auc_bounds(value: float, positive: float, negative: float) -> tuple[float, float]:
    """Newcombe's score interval of an AUC of so many patients: the areas from which the value is 1.96 standard
    errors away, by their own standard error."""
    from scipy.optimize import brentq  # slow to import

    pairs = positive * negative
    middle = (positive + negative) / 2 - 1

    def apart(area: float) -> float:
        variance = area * (1 - area) * (1 + middle * ((1 - area) / (2 - area) + area / (1 + area))) / pairs
        return float((value - area) ** 2 - Z**2 * variance)

    inside = min(max(value, 1e-15), 1 - 1e-15)  # at 0 and 1 areas have no standard error
    ends = (brentq(apart, end, inside, xtol=1e-16) if end != value else end for end in (0.0, 1.0))
    low, high = map(float, ends)
    return low, high


def summarise(
    predictions: Predictions, scores: Mapping[str, Score], resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Every score with its 95 % interval, as JSON.

    Returns:
        `slides` and `patients` (how many); `classes` (names, where there are classes); `slide` and `patient`
        (`Interval.to_dict` by score, of the rows and of the patients; `patient_absent` says why where those of a target
        cannot be scored); `per_class` (the same of each class against the rest, by class); `per_site` (by site, where
        the manifest names at least two: `slides`, `patients` and `slide`). Of several targets, names of scores and
        `per_class` have the target's name and `_` before them, but for those of the first, and `targets` has the
        `slides` and `patients` that have a label of each.
    """

    def intervals(rows: Predictions, wanted: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
        return {name: found.to_dict() for name, found in score_intervals(rows, wanted, resamples, seed).items()}

    result: dict[str, Any] = {
        "slides": len(predictions),
        "patients": len(set(predictions.patients)),
        "classes": list(getattr(predictions, "classes", ())),
        "slide": intervals(predictions, scores),
    }
    patients: dict[str, dict[str, Any]] = {}
    for part, own in predictions.scored(scores):
        try:
            patients |= intervals(part.by_patient(), own)
        except PredictionsError as error:
            result["patient_absent"] = str(error)
    if patients:
        result["patient"] = patients
    if len(targets := predictions.by_target) > 1:
        result["targets"] = {
            name: {"slides": len(part), "patients": len(set(part.patients))} for name, part in targets.items()
        }
    for heading, parts in predictions.by_class(scores).items():
        result[heading] = {name: intervals(*part) for name, part in parts.items()}
    sites = np.array(predictions.sites)
    if len(names := sorted(set(predictions.sites) - {""})) > 1:
        each = {name: predictions.take(np.flatnonzero(sites == name)) for name in names}
        result["per_site"] = {
            name: {"slides": len(part), "patients": len(set(part.patients)), "slide": intervals(part, scores)}
            for name, part in each.items()
        }
    return result


def cross_validation(
    folds: Sequence[Kind], scores: Mapping[str, Score], resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """The scores of each fold's held-out slides, their mean and spread, and the scores of all of them pooled.

    Returns:
        `folds` (a list with `slides` and `slide`: score by name), `mean` and `sd` (score by name; the standard
        deviation between folds, which is no interval of the mean: folds share their training slides), `pooled`
        (score by name with its 95 % interval, all held-out slides together: the models of the folds differ, so it also
        asks whether their predictions are on one scale). `patient` has `folds` (a list of score by name), `mean`, `sd`
        and `pooled` of the patients; `patient_absent` says why where patients cannot be scored.
    """
    each, slides = _over_folds(folds, joined_folds(folds), scores, resamples, seed)
    result = {"folds": [{"slides": len(fold), "slide": values} for fold, values in zip(folds, each, strict=True)]}
    result |= slides
    try:
        each, patients = _over_folds(
            [fold.by_patient() for fold in folds], joined_folds(folds).by_patient(), scores, resamples, seed
        )
    except PredictionsError as error:
        return result | {"patient_absent": str(error)}
    return result | {"patient": {"folds": each, **patients}}


def _over_folds(
    folds: Sequence[Predictions], pooled: Predictions, scores: Mapping[str, Score], resamples: int, seed: int
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The scores of each fold, and their mean, their standard deviation, and those of all rows together."""
    each = [{name: score(fold) for name, score in scores.items()} for fold in folds]
    return each, {
        "mean": {name: float(np.mean([values[name] for values in each])) for name in scores},
        "sd": {name: float(np.std([values[name] for values in each], ddof=1)) for name in scores},
        "pooled": {name: found.to_dict() for name, found in score_intervals(pooled, scores, resamples, seed).items()},
    }


def joined_folds(folds: Sequence[Kind]) -> Kind:
    """The held-out slides of all folds; an error names a slide that two folds hold out."""
    if len(folds) < 2:
        raise PredictionsError(f"there are {len(folds)} folds; a cross-validation has at least 2")
    seen: dict[str, int] = {}
    for number, fold in enumerate(folds):
        for slide in fold.slides:
            if slide in seen:
                raise PredictionsError(f"slide {slide} is held out in the folds {seen[slide]} and {number}")
            seen[slide] = number
    return join(folds)
