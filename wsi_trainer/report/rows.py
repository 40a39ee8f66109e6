"""The table of slides: one line for each, worst mistakes first, for every kind of prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics import (
    AnyPredictions,
    AreaPredictions,
    JointPredictions,
    MultiLabelPredictions,
    Predictions,
    ValuePredictions,
)


@dataclass(frozen=True)
class SlideRow:
    """One line of the table of slides."""

    slide: str
    path: Path
    patient: str
    site: str
    label: str
    predicted: str
    error: float
    """How wrong the prediction is: the worst mistakes have the highest. See `errors`."""
    probability: float | None
    """Of the predicted class, where there are exclusive classes."""
    baseline: float | None
    """The error of the baseline on this slide."""
    map: Path | None
    """The picture of what the model looked at."""
    wrong: bool
    """Whether another class is predicted than the label; never where there are no classes."""


ERRORS = {
    Predictions: "one minus the probability of the true class",
    MultiLabelPredictions: "mean distance of the probabilities from the labels that are known",
    ValuePredictions: "distance of the predicted number from the true one",
    AreaPredictions: "share of the pixels that are predicted wrong",
}
OTHER_ERROR = "share of the slides it can be compared with that are ordered wrongly"


def errors(predictions: AnyPredictions) -> NDArray[np.float64]:
    """How wrong the prediction of each slide is; what it means says `meaning`."""
    if isinstance(predictions, JointPredictions):
        return errors(predictions.labels)
    if isinstance(predictions, Predictions):
        return 1 - predictions.probabilities[np.arange(len(predictions)), predictions.labels]
    if isinstance(predictions, MultiLabelPredictions):
        distance = np.abs(predictions.labels - predictions.probabilities)
        return np.nansum(distance, axis=1) / np.maximum((~np.isnan(distance)).sum(axis=1), 1)
    if isinstance(predictions, ValuePredictions):
        return np.abs(predictions.values - predictions.targets)
    if isinstance(predictions, AreaPredictions):
        right, _, drawn = predictions.pixels.sum(axis=2).T
        return 1 - np.divide(right, drawn, out=np.ones_like(right), where=drawn > 0)
    first = (predictions.times[:, None] < predictions.times) & predictions.events[:, None]
    reversed_ = first & (predictions.risks[:, None] < predictions.risks)
    compared = first.sum(axis=0) + first.sum(axis=1)
    return (reversed_.sum(axis=0) + reversed_.sum(axis=1)) / np.maximum(compared, 1)


def meaning(predictions: AnyPredictions) -> str:
    """What the error of a slide is; where pixels have classes too, it is that of the slide's target."""
    said = predictions.labels if isinstance(predictions, JointPredictions) else predictions
    return ERRORS.get(type(said), OTHER_ERROR)


@dataclass(frozen=True)
class Words:
    """A label and a prediction as a reader reads them."""

    label: str
    predicted: str
    probability: float | None = None
    wrong: bool = False


def words(predictions: AnyPredictions, row: int) -> Words:
    """The label and the prediction of a row."""
    if isinstance(predictions, JointPredictions):
        slide, pixels = words(predictions.labels, row), words(predictions.areas, row)
        return replace(
            slide, label=f"{slide.label}; {pixels.label}", predicted=f"{slide.predicted}; {pixels.predicted}"
        )
    if isinstance(predictions, Predictions):
        said = predictions.probabilities[row]
        label, found = predictions.labels[row], int(said.argmax())
        return Words(predictions.classes[label], predictions.classes[found], float(said[found]), bool(label != found))
    if isinstance(predictions, MultiLabelPredictions):
        labels = predictions.labels[row]
        known = ~np.isnan(labels)
        applied = predictions.probabilities[row] >= 0.5
        wrong = bool((applied[known] != (labels[known] == 1)).any())
        return Words(_names(predictions, labels == 1), _names(predictions, applied), wrong=wrong)
    if isinstance(predictions, ValuePredictions):
        return Words(f"{predictions.targets[row]:.4g}", f"{predictions.values[row]:.4g}")
    if isinstance(predictions, AreaPredictions):
        _, found, drawn = predictions.pixels[row]
        return Words(_shares(predictions.classes, drawn), _shares(predictions.classes, found))
    happened = "event at" if predictions.events[row] else "no event until"
    return Words(f"{happened} {predictions.times[row]:g}", f"risk {predictions.risks[row]:.3g}")


def _shares(classes: tuple[str, ...], pixels: NDArray[np.float64]) -> str:
    """How much of the pixels that count is of each class but the first."""
    shares = pixels / max(pixels.sum(), 1)
    return ", ".join(f"{name} {100 * share:.2g} %" for name, share in list(zip(classes, shares, strict=True))[1:])


def _names(predictions: MultiLabelPredictions, applied: NDArray[np.bool_]) -> str:
    return ", ".join(name for name, does in zip(predictions.classes, applied, strict=True) if does) or "none"
