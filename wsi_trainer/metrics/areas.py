"""Predictions of a class for each pixel, as areas, and their scores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.class_pixels import ClassPixels, mean
from wsi_trainer.metrics.scores import Score


class AreaPredictions(ClassPixels):
    """Pixels that are rightly predicted to be of each class, that are predicted to be of it, that are."""

    KINDS = ("right", "predicted", "drawn")


def ratios(pixels: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """A ratio of each class from (..., 3, classes) pixels; NaN where there is nothing to divide by."""
    right, predicted, drawn = (pixels[..., place, :] for place in range(3))
    parts = {
        "dice": (2 * right, predicted + drawn),
        "iou": (right, predicted + drawn - right),
        "recall": (right, drawn),
        "precision": (right, predicted),
    }
    above, below = parts[kind]
    return np.divide(above, below, out=np.full(below.shape, np.nan), where=below > 0)


def dice(predictions: AreaPredictions) -> float:
    """The mean over all classes but the first of Dice's coefficient of all slides' pixels together."""
    return mean(ratios(predictions.pixels.sum(axis=0), "dice")[1:])


def slide_dice(predictions: AreaPredictions) -> float:
    """The mean over slides of Dice's coefficient, over the classes but the first that are drawn or predicted there."""
    return mean(np.array([mean(row[1:]) for row in ratios(predictions.pixels, "dice")]))


def mean_iou(predictions: AreaPredictions) -> float:
    """The mean over all classes of intersection over union of all slides' pixels together."""
    return mean(ratios(predictions.pixels.sum(axis=0), "iou"))


def pixel_accuracy(predictions: AreaPredictions) -> float:
    """The share of pixels that are predicted right."""
    right, _, drawn = predictions.pixels.sum(axis=(0, 2))
    return float(right / drawn) if drawn else float("nan")


def class_ratio(predictions: AreaPredictions, place: int, kind: str) -> float:
    """Dice's coefficient, intersection over union, recall or precision of one class, of all slides' pixels."""
    return float(ratios(predictions.pixels.sum(axis=0), kind)[place])


AREA_SCORES: Mapping[str, Score] = {
    "dice": dice,
    "slide_dice": slide_dice,
    "mean_iou": mean_iou,
    "pixel_accuracy": pixel_accuracy,
}
