"""Predictions of a class for each pixel, as areas, and their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.scores import Score
from wsi_trainer.metrics.table import PredictionsError, check_rows, read_rows, write_rows

KINDS = ("right", "predicted", "drawn")
"""What is counted of each class: pixels that are predicted to be of it and are, that are predicted, that are."""


@dataclass(frozen=True)
class AreaPredictions:
    """Pixels of each class, one row for each slide (or each patient): those that count, whatever was ignored."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    pixels: NDArray[np.float64]
    """(rows, 3, classes): of each class `KINDS`."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rows(len(self.slides), self.patients, self.sites)
        wanted = (len(self), len(KINDS), len(self.classes))
        if self.pixels.shape != wanted:
            raise PredictionsError(f"pixels have the shape {self.pixels.shape}, not {wanted}")

    def __len__(self) -> int:
        return len(self.slides)

    def take(self, rows: NDArray[np.int64]) -> AreaPredictions:
        """The rows with these indices, in this order, repeats included."""
        return AreaPredictions(
            tuple(self.slides[i] for i in rows),
            tuple(self.patients[i] for i in rows),
            self.classes,
            self.pixels[rows],
            tuple(self.sites[i] for i in rows) if self.sites else (),
        )

    def by_patient(self) -> AreaPredictions:
        """One row for each patient: the pixels of all slides."""
        owners = np.array(self.patients)
        names = tuple(dict.fromkeys(self.patients))
        rows = [np.flatnonzero(owners == name) for name in names]
        sites = tuple(self.sites[index[0]] for index in rows) if self.sites else ()
        return AreaPredictions(
            names, names, self.classes, np.stack([self.pixels[index].sum(axis=0) for index in rows]), sites
        )

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, right_<class> ..., predicted_<class> ..., drawn_<class> ..."""
        columns = [f"{kind}_{name}" for kind in KINDS for name in self.classes]
        write_rows(path, self, columns, self.pixels.reshape(len(self), -1).tolist())

    @staticmethod
    def read(path: Path) -> AreaPredictions:
        """Read what `write` wrote."""
        table = read_rows(path)
        classes = tuple(name.removeprefix("right_") for name in table.columns if name.startswith("right_"))
        columns = [f"{kind}_{name}" for kind in KINDS for name in classes]
        absent = [name for name in columns if name not in table.columns]
        if absent:
            raise PredictionsError(f"{path} lacks the columns {absent}")
        numbers = table.numbers(columns).reshape(len(table.rows), len(KINDS), len(classes))
        return AreaPredictions(table.texts("slide"), table.texts("patient"), classes, numbers, table.sites)


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
    return _mean(ratios(predictions.pixels.sum(axis=0), "dice")[1:])


def slide_dice(predictions: AreaPredictions) -> float:
    """The mean over slides of Dice's coefficient, over the classes but the first that are drawn or predicted there."""
    return _mean(np.array([_mean(row[1:]) for row in ratios(predictions.pixels, "dice")]))


def mean_iou(predictions: AreaPredictions) -> float:
    """The mean over all classes of intersection over union of all slides' pixels together."""
    return _mean(ratios(predictions.pixels.sum(axis=0), "iou"))


def pixel_accuracy(predictions: AreaPredictions) -> float:
    """The share of pixels that are predicted right."""
    right, _, drawn = predictions.pixels.sum(axis=(0, 2))
    return float(right / drawn) if drawn else float("nan")


def class_ratio(predictions: AreaPredictions, place: int, kind: str) -> float:
    """Dice's coefficient, intersection over union, recall or precision of one class, of all slides' pixels."""
    return float(ratios(predictions.pixels.sum(axis=0), kind)[place])


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


AREA_SCORES: Mapping[str, Score] = {
    "dice": dice,
    "slide_dice": slide_dice,
    "mean_iou": mean_iou,
    "pixel_accuracy": pixel_accuracy,
}
