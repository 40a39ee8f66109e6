"""How well the borders of predicted classes lie on those that were drawn."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.class_pixels import ClassPixels, mean
from wsi_trainer.metrics.scores import Score


class BorderPredictions(ClassPixels):
    """Pixels on the found border of each class, those of them near the drawn one, and the same the other way round."""

    KINDS = ("found_near", "found", "drawn_near", "drawn")


def border_ratios(pixels: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """A score of each class from (..., 4, classes) pixels.

    Args:
        pixels: What `BorderPredictions` counts.
        kind: `border_precision`, the share of the found border that is near the drawn one; `border_recall`, that of
            the drawn one near the found one; `border_f1`, their harmonic mean. NaN where there is nothing to divide by.
    """
    found_near, found, drawn_near, drawn = (pixels[..., place, :] for place in range(4))
    precision, recall = _share(found_near, found), _share(drawn_near, drawn)
    if kind == "border_f1":
        known = found + drawn > 0  # a border that is missing on one side is a score of 0
        precision, recall = np.nan_to_num(precision), np.nan_to_num(recall)
        return np.where(known, _share(2 * precision * recall, precision + recall, 0.0), np.nan)
    return {"border_precision": precision, "border_recall": recall}[kind]


def border_f1(predictions: BorderPredictions) -> float:
    """The mean over all classes but the first of the F1 of all slides' borders together."""
    return mean(border_ratios(predictions.pixels.sum(axis=0), "border_f1")[1:])


def slide_border_f1(predictions: BorderPredictions) -> float:
    """The mean over slides of the F1, over the classes but the first that have a border there."""
    return mean(np.array([mean(row[1:]) for row in border_ratios(predictions.pixels, "border_f1")]))


def class_border(predictions: BorderPredictions, place: int, kind: str) -> float:
    """A score of one class, of all slides' borders together."""
    return float(border_ratios(predictions.pixels.sum(axis=0), kind)[place])


def _share(
    above: NDArray[np.float64], below: NDArray[np.float64], without: float = float("nan")
) -> NDArray[np.float64]:
    return np.divide(above, below, out=np.full(below.shape, without), where=below > 0)


BORDER_KINDS = ("border_f1", "border_precision", "border_recall")
BORDER_SCORES: Mapping[str, Score] = {"border_f1": border_f1, "slide_border_f1": slide_border_f1}
