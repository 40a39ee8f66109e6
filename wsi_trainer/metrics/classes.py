"""Predictions of classes of slides, exclusive or not, and their scores.

Scores are written with NumPy: a bootstrap asks for each a thousand times, and checking arguments would take most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.decision import EVEN, Decision, decide, threshold
from wsi_trainer.metrics.table import Predictions, PredictionsError, Score, Table, Words

CURVES = ("roc", "precision_recall", "calibration", "decision_curve")


def area_under_roc(truth: NDArray[np.bool_], said: NDArray[np.float64]) -> float:
    """The share of pairs of a true and a false row that are in the right order; a tie counts half."""
    positive = int(truth.sum())
    negative = len(truth) - positive
    if not positive or not negative:
        return float("nan")
    below = np.sort(said[~truth])
    pairs = np.searchsorted(below, said[truth], "left").sum() + np.searchsorted(below, said[truth], "right").sum()
    return float(pairs / (2 * positive * negative))


def counts_above(truth: NDArray[np.bool_], said: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """True and false rows at or above each threshold, from the highest on; ties share a threshold."""
    order = np.argsort(-said, kind="stable")
    ordered = said[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    right = np.cumsum(truth[order])[last]
    return right, last + 1 - right


def precision_averaged(truth: NDArray[np.bool_], said: NDArray[np.float64]) -> float:
    """The mean over the true rows of the precision at their threshold."""
    if not truth.any() or truth.all():
        return float("nan")
    right, wrong = counts_above(truth, said)
    return float((np.diff(right, prepend=0) * right / (right + wrong)).sum() / right[-1])


def _mean_over_classes(
    predictions: ClassPredictions, score: Callable[[NDArray[np.bool_], NDArray[np.float64]], float]
) -> float:
    classes = [1] if len(predictions.classes) == 2 else range(len(predictions.classes))
    return float(np.mean([score(predictions.labels == i, predictions.probabilities[:, i]) for i in classes]))


@dataclass(frozen=True)
class Auc:
    """Area under the ROC curve of one class against the rest; without a class, of the second of two, or the mean."""

    index: int | None = None

    def __call__(self, predictions: ClassPredictions) -> float:
        if self.index is None:
            return _mean_over_classes(predictions, area_under_roc)
        return area_under_roc(predictions.labels == self.index, predictions.probabilities[:, self.index])

    def said(self, predictions: ClassPredictions) -> NDArray[np.float64]:
        """(rows,) the probability of the class, or of the second of two."""
        return predictions.probabilities[:, 1 if self.index is None else self.index]

    def positive(self, predictions: Any) -> NDArray[np.bool_] | None:
        """The rows of the class, where there is one that is compared with the rest."""
        index = 1 if self.index is None and len(predictions.classes) == 2 else self.index
        return None if index is None else predictions.labels == index


auc = Auc()


def average_precision(predictions: ClassPredictions) -> float:
    """Average precision; with several classes the mean over one-against-rest."""
    return _mean_over_classes(predictions, precision_averaged)


def balanced_accuracy(predictions: ClassPredictions) -> float:
    """The mean over classes of the share of its slides that are predicted right."""
    counts = confusion(predictions)
    present = counts.sum(axis=1) > 0
    return float((counts.diagonal()[present] / counts.sum(axis=1)[present]).mean())


def f1(predictions: ClassPredictions) -> float:
    """F1 of the second class, or the mean over all classes where there are more than two."""
    counts = confusion(predictions)
    right, mentioned = counts.diagonal(), counts.sum(axis=0) + counts.sum(axis=1)
    values = np.divide(2 * right, mentioned, out=np.zeros(len(counts)), where=mentioned > 0)
    return float(values[1] if len(counts) == 2 else values.mean())


def quadratic_kappa(predictions: ClassPredictions) -> float:
    """Cohen's kappa of ordered classes, a mistake weighted by the square of the distance."""
    counts = confusion(predictions).astype(np.float64)
    places = np.arange(len(counts))
    weights = (places[:, None] - places) ** 2
    by_chance = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    expected = (weights * by_chance).sum()
    return float(1 - (weights * counts).sum() / expected) if expected else float("nan")


def brier(predictions: ClassPredictions) -> float:
    """Mean squared distance of the probabilities from the truth, 0 for a perfect and sure model."""
    truth = np.eye(len(predictions.classes))[predictions.labels]
    return float(((predictions.probabilities - truth) ** 2).sum(axis=1).mean() / 2)


def calibration_error(predictions: ClassPredictions, bins: int = 10) -> float:
    """Root mean squared distance of frequencies from probabilities over bins of equal width, without chance's part.

    The square of a bin's distance is, on average, larger than the truth by the variance of that distance, which is
    taken off (debiased as by Kumar et al., NeurIPS 2019; here with patients as units). A calibrated model has 0 or
    little more. In a bin of one patient it is the variance that the probabilities say themselves.

    With two classes the probability of the second is compared with how often it is the label, else that of the
    predicted class with how often it is right.
    """
    if len(predictions.classes) == 2:
        said, happened = predictions.probabilities[:, 1], predictions.labels == 1
    else:
        said = predictions.probabilities.max(axis=1)
        happened = predictions.decided == predictions.labels
    owners, patient = np.unique(np.asarray(predictions.patients), return_inverse=True)
    place = np.minimum((said * bins).astype(int), bins - 1)
    cells, cell = np.unique(place * len(owners) + patient, return_inverse=True)
    of_bin = cells // len(owners)
    slides, apart = np.bincount(cell), np.bincount(cell, said - happened)
    units, size = np.bincount(of_bin, minlength=bins), np.bincount(of_bin, slides, bins)
    gap = np.bincount(of_bin, apart, bins) / np.maximum(size, 1)
    spread = np.bincount(of_bin, (apart - slides * gap[of_bin]) ** 2, bins)
    variance = np.where(
        units > 1, units / np.maximum(units - 1, 1) * spread, np.bincount(place, said * (1 - said), bins)
    )
    square = size * gap**2 - variance / np.maximum(size, 1)
    return float(np.sqrt(max(square.sum() / size.sum(), 0.0)))


def is_biased(score: Score) -> bool:
    """True for a calibration error, also one of several labels or of a target: chance alone makes it larger."""
    while (within := getattr(score, "score", None) or getattr(score, "keywords", {}).get("score")) is not None:
        score = within
    return score is calibration_error


def confusion(predictions: ClassPredictions) -> NDArray[np.int64]:
    """(classes, classes) counts of slides: the label gives the row, the class decided for the column."""
    size = len(predictions.classes)
    return np.bincount(predictions.labels * size + predictions.decided, minlength=size * size).reshape(size, size)


SCORES: Mapping[str, Score] = {
    "auc": auc,
    "average_precision": average_precision,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "brier": brier,
    "calibration_error": calibration_error,
}
"""Of exclusive classes."""
ORDINAL_SCORES: Mapping[str, Score] = {"quadratic_kappa": quadratic_kappa, **SCORES}
"""Of ordered classes."""


@dataclass(frozen=True, repr=False)
class ClassPredictions(Predictions):
    """Labels and predicted probabilities, which sum to one, of classes that exclude each other."""

    KIND = "classes"
    COLUMNS: ClassVar = {"labels": "label", "probabilities": "probability_"}
    SCORES = SCORES
    ERROR = "one minus the probability of the true class"
    FIGURES = (*CURVES, "confusion")
    NAMED = True

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    """Index into `classes` of each row; -1 where the label is not known."""
    probabilities: NDArray[np.float64]
    """(rows, classes), each in 0..1."""
    sites: tuple[str, ...] = ()
    thresholds: NDArray[np.float64] | None = None
    """(rows,) probability of the second of two classes from which on it is decided for; None for the most probable
    class.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not np.isfinite(self.probabilities).all():
            bad = self.slides[int(np.flatnonzero(~np.isfinite(self.probabilities).all(axis=1))[0])]
            raise PredictionsError(f"the prediction of slide {bad} is not a finite number")

    def of_patient(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """With two classes a patient is positive when any slide is, and has the highest probability of its slides.

        With more, the probabilities are averaged and the slides of a patient have to agree on the label.
        """
        labels, probabilities = self.labels[rows], self.probabilities[rows]
        if len(self.classes) == 2:
            return {"labels": labels.max(), "probabilities": probabilities[probabilities[:, 1].argmax()]}
        if len(set(labels.tolist())) > 1:
            patient = self.patients[rows[0]]
            raise PredictionsError(f"the slides of patient {patient} have different labels; use slide-level metrics")
        return {"labels": labels[0], "probabilities": probabilities.mean(axis=0)}

    @property
    def known(self) -> NDArray[np.bool_]:
        return self.labels >= 0

    @property
    def decided(self) -> NDArray[np.int64]:
        """(rows,) the class that is decided for, as an index into `classes`."""
        return decide(self.probabilities, self.thresholds)

    def decided_by(self, decision: Decision) -> Self:
        given = np.full(len(self), decision.thresholds[0]) if decision.thresholds else None
        return replace(self, thresholds=given)

    def chosen(self, rule: str) -> Decision | None:
        if len(self.classes) != 2:
            return None
        found = threshold(self.labels == 1, self.probabilities[:, 1], rule)
        return Decision((EVEN if np.isnan(found) else found,), rule)

    def declaration(self) -> dict[str, Any]:
        (own,) = super().declaration().values()
        return {self.TARGET: own | ({} if self.thresholds is None else {"thresholds": _same(self.thresholds[:, None])})}

    def binary(self) -> Mapping[str, ClassPredictions]:
        return {"": self} if len(self.classes) == 2 else {}

    def errors(self) -> NDArray[np.float64]:
        return np.where(self.known, 1 - self.probabilities[np.arange(len(self)), self.labels], np.nan)

    def words(self, row: int) -> Words:
        label, found = int(self.labels[row]), int(self.decided[row])
        said = float(self.probabilities[row, found])
        return Words(self._name(label), self.classes[found], said, label not in (found, -1))

    def _name(self, label: int) -> str:
        return "" if label < 0 else self.classes[label]

    def groups(self) -> list[NDArray[np.bool_]]:
        return [self.labels == index for index in range(len(self.classes))]

    @property
    def positives(self) -> NDArray[np.bool_] | None:
        return self.labels == 1 if len(self.classes) == 2 else None

    def of(self, name: str) -> ClassPredictions:
        """One class against the rest, as predictions of two classes."""
        index = self.classes.index(name)
        labels, both = (self.labels == index).astype(np.int64), _both(self.probabilities[:, index])
        return ClassPredictions(self.slides, self.patients, (f"not {name}", name), labels, both, self.sites)

    def like(self, other: Predictions) -> Self:
        classes = tuple(getattr(other, "classes", ()))
        if sorted(self.classes) != sorted(classes):
            raise PredictionsError(f"the classes are {', '.join(self.classes)} here and {', '.join(classes)} there")
        places = [self.classes.index(name) for name in classes]
        labels = np.array([*(classes.index(name) for name in self.classes), -1])[self.labels]
        # A threshold is of the second of two classes, which is now the other one.
        cuts = self.thresholds if self.thresholds is None or classes == self.classes else 1 - self.thresholds
        return replace(
            self, classes=classes, labels=labels, probabilities=self.probabilities[:, places], thresholds=cuts
        )

    def by_class(self, scores: Mapping[str, Score]) -> dict[str, dict[str, tuple[Predictions, dict[str, Score]]]]:
        return {"per_class": {name: (self, class_scores(index)) for index, name in enumerate(self.classes)}}

    def columns(self) -> dict[str, list[Any]]:
        return super().columns() | {"label": [self._name(label) for label in self.labels]}

    @classmethod
    def of_table(cls, table: Table, classes: Sequence[str] = ()) -> Self:
        classes = tuple(classes) or table.classes("probability_")
        table.need("label")
        places = {name: place for place, name in enumerate(classes)} | {"": -1}
        unknown = next((label for label in table.texts("label") if label not in places), None)
        if unknown is not None:
            raise PredictionsError(f"{table.path} has the label {unknown!r}, which is none of its {list(classes)}")
        labels = np.array([places[label] for label in table.texts("label")], dtype=np.int64)
        numbers = table.numbers([f"probability_{name}" for name in classes])
        return cls(*table.owners, classes, labels, numbers, table.sites)


def _both(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """(rows, 2) probabilities of two classes, from that of the second."""
    return np.stack([1 - probability, probability], axis=1)


def _same(thresholds: NDArray[np.float64]) -> list[float]:
    """The thresholds that all rows have; an error where folds were joined, each of which has its own."""
    if len(np.unique(thresholds, axis=0)) > 1:
        raise PredictionsError("rows of several runs are decided by several thresholds, of which a file has one")
    return [float(one) for one in thresholds[0]] if len(thresholds) else []


def class_scores(index: int) -> dict[str, Score]:
    """The scores of one class against the rest; recall and precision are of the class that is decided for."""

    def against_rest(predictions: ClassPredictions, score: Callable[..., float]) -> float:
        return score(predictions.labels == index, predictions.probabilities[:, index])

    def share(predictions: ClassPredictions, axis: int) -> float:
        counts = confusion(predictions)
        total = counts.sum(axis=axis)[index]
        return float(counts[index, index] / total) if total else float("nan")

    return {
        "auc": Auc(index),
        "average_precision": partial(against_rest, score=precision_averaged),
        "recall": partial(share, axis=1),
        "precision": partial(share, axis=0),
    }


def macro(predictions: MultiLabelPredictions, score: Score) -> float:
    """The mean of a score of two classes over the labels; NaN where one of them does not define it."""
    return float(np.mean([score(predictions.of(name)) for name in predictions.classes]))


MULTI_LABEL_SCORES: Mapping[str, Score] = {name: partial(macro, score=score) for name, score in SCORES.items()}


@dataclass(frozen=True, repr=False)
class MultiLabelPredictions(Predictions):
    """Labels of which several may apply, each with its predicted probability."""

    KIND = "labels"
    COLUMNS: ClassVar = {"labels": "label_", "probabilities": "probability_"}
    SCORES = MULTI_LABEL_SCORES
    ERROR = "mean distance of the probabilities from the labels that are known"
    FIGURES = CURVES
    NAMED = True

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    labels: NDArray[np.float64]
    """(rows, classes): 1 where it applies, 0 where not, NaN where that is not known."""
    probabilities: NDArray[np.float64]
    sites: tuple[str, ...] = ()
    thresholds: NDArray[np.float64] | None = None
    """(rows, classes) probability from which on a label is decided for; None for those above 0.5."""

    @property
    def known(self) -> NDArray[np.bool_]:
        return np.asarray(~np.isnan(self.labels).all(axis=1))

    @property
    def decided(self) -> NDArray[np.bool_]:
        """(rows, classes): whether a label is decided for."""
        cut = [None] * len(self.classes) if self.thresholds is None else self.thresholds.T
        each = zip(self.probabilities.T, cut, strict=True)
        return np.array([decide(_both(p), at) == 1 for p, at in each], dtype=bool).T

    def decided_by(self, decision: Decision) -> Self:
        given = np.tile(np.array(decision.thresholds), (len(self), 1)) if decision.thresholds else None
        return replace(self, thresholds=given)

    def chosen(self, rule: str) -> Decision | None:
        found = [self.of(name).chosen(rule) for name in self.classes]
        return Decision(tuple(one.thresholds[0] for one in found if one is not None), rule)

    def declaration(self) -> dict[str, Any]:
        (own,) = super().declaration().values()
        return {self.TARGET: own | ({} if self.thresholds is None else {"thresholds": _same(self.thresholds)})}

    def of(self, name: str) -> ClassPredictions:
        """One label against its absence, as predictions of two classes: the slides where it is known."""
        place = self.classes.index(name)
        one = self.take(np.flatnonzero(~np.isnan(self.labels[:, place])))
        labels, both = one.labels[:, place].astype(np.int64), _both(one.probabilities[:, place])
        cut = None if one.thresholds is None else one.thresholds[:, place]
        return ClassPredictions(one.slides, one.patients, (f"not {name}", name), labels, both, one.sites, cut)

    def binary(self) -> Mapping[str, ClassPredictions]:
        return {name: self.of(name) for name in self.classes}

    def of_patient(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """A label applies where it does on any slide, with its highest probability."""
        return {"labels": np.fmax.reduce(self.labels[rows]), "probabilities": self.probabilities[rows].max(axis=0)}

    def errors(self) -> NDArray[np.float64]:
        distance = np.abs(self.labels - self.probabilities)
        return np.asarray(np.nansum(distance, axis=1) / np.maximum((~np.isnan(distance)).sum(axis=1), 1))

    def words(self, row: int) -> Words:
        labels, applied = self.labels[row], self.decided[row]
        known = ~np.isnan(labels)
        wrong = bool((applied[known] != (labels[known] == 1)).any())
        label = self._names(labels == 1) if known.any() else ""
        return Words(label, self._names(applied), wrong=wrong)

    def _names(self, applied: NDArray[np.bool_]) -> str:
        return ", ".join(name for name, does in zip(self.classes, applied, strict=True) if does) or "none"

    def groups(self) -> list[NDArray[np.bool_]]:
        return [*(self.labels == 1).T, *(self.labels == 0).T]

    def by_class(self, scores: Mapping[str, Score]) -> dict[str, dict[str, tuple[Predictions, dict[str, Score]]]]:
        return {"per_class": {name: (self.of(name), dict(SCORES)) for name in self.classes}}
