"""Predictions of a class for each pixel: areas and borders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.table import Predictions, PredictionsError, Score, Table, Words


def mean(values: NDArray[np.float64]) -> float:
    """The mean of the known values; NaN where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _share(
    above: NDArray[np.float64], below: NDArray[np.float64], without: float = float("nan")
) -> NDArray[np.float64]:
    return np.divide(above, below, out=np.full(below.shape, without), where=below > 0)


@dataclass(frozen=True, repr=False)
class PixelPredictions(Predictions):
    """Numbers of pixels of each class, one row for each slide (or each patient); ignored pixels are left out."""

    TARGET = "regions"
    OF_PIXELS = True
    KINDS: ClassVar[tuple[str, ...]]
    """Counts of each class."""
    RATIOS: ClassVar[tuple[str, ...]]
    """Scores of one class."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    classes: tuple[str, ...]
    pixels: NDArray[np.float64]
    """(rows, kinds, classes)."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pixels.shape != (shape := (len(self.slides), len(self.KINDS), len(self.classes))):
            raise PredictionsError(f"{shape[0]} slides have pixels of shape {self.pixels.shape}, not {shape}")

    def ratios(self, pixels: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
        """One of `RATIOS` of each class from (..., kinds, classes) pixels; NaN where there is nothing to divide by."""
        raise NotImplementedError

    def pooled(self, kind: str) -> NDArray[np.float64]:
        """A ratio of each class, of all slides' pixels together."""
        return self.ratios(self.pixels.sum(axis=0), kind)

    @property
    def truth(self) -> NDArray[np.float64]:
        """The pixels that are drawn."""
        return self.pixels[:, self.KINDS.index("drawn")]

    def of_patient(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """The pixels of all slides."""
        return {"pixels": self.pixels[rows].sum(axis=0)}

    def groups(self) -> list[NDArray[np.bool_]]:
        return [*(self.truth[:, 1:] > 0).T]

    def by_class(self, scores: Mapping[str, Score]) -> dict[str, dict[str, tuple[Predictions, dict[str, Score]]]]:
        def of(predictions: PixelPredictions, place: int, kind: str) -> float:
            return float(predictions.pooled(kind)[place])

        return {
            "per_class": {
                name: (self, {kind: partial(of, place=place, kind=kind) for kind in self.RATIOS})
                for place, name in enumerate(self.classes)
            }
        }

    def columns(self) -> dict[str, list[Any]]:
        names = [f"{kind}_{name}" for kind in self.KINDS for name in self.classes]
        return dict(zip(names, self.pixels.reshape(len(self), -1).T.tolist(), strict=True))

    @classmethod
    def of_table(cls, table: Table, classes: Sequence[str] = ()) -> Self:
        classes = tuple(classes) or table.classes(f"{cls.KINDS[0]}_")
        numbers = table.numbers([f"{kind}_{name}" for kind in cls.KINDS for name in classes])
        return cls(*table.owners, classes, numbers.reshape(len(table.rows), len(cls.KINDS), len(classes)), table.sites)


def _over_classes(predictions: PixelPredictions, kind: str, first: int = 1) -> float:
    """The mean over classes of a ratio of all slides' pixels together."""
    return mean(predictions.pooled(kind)[first:])


def _over_slides(predictions: PixelPredictions, kind: str) -> float:
    """The mean over slides of a ratio, over the classes but the first that are drawn or predicted there."""
    return mean(np.array([mean(row[1:]) for row in predictions.ratios(predictions.pixels, kind)]))


def pixel_accuracy(predictions: AreaPredictions) -> float:
    """The share of pixels that are predicted right."""
    right, _, drawn = predictions.pixels.sum(axis=(0, 2))
    return float(right / drawn) if drawn else float("nan")


AREA_SCORES: Mapping[str, Score] = {
    "dice": partial(_over_classes, kind="dice"),
    "slide_dice": partial(_over_slides, kind="dice"),
    "mean_iou": partial(_over_classes, kind="iou", first=0),
    "pixel_accuracy": pixel_accuracy,
}
BORDER_SCORES: Mapping[str, Score] = {
    "border_f1": partial(_over_classes, kind="border_f1"),
    "slide_border_f1": partial(_over_slides, kind="border_f1"),
}


class AreaPredictions(PixelPredictions):
    """Pixels that are rightly predicted to be of each class, that are predicted to be of it, that are."""

    KIND = "areas"
    KINDS = ("right", "predicted", "drawn")
    RATIOS = ("dice", "iou", "recall", "precision")
    SCORES = AREA_SCORES
    ERROR = "share of the pixels that are predicted wrong"

    def ratios(self, pixels: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
        right, predicted, drawn = (pixels[..., place, :] for place in range(3))
        parts = {
            "dice": (2 * right, predicted + drawn),
            "iou": (right, predicted + drawn - right),
            "recall": (right, drawn),
            "precision": (right, predicted),
        }
        return _share(*parts[kind])

    def errors(self) -> NDArray[np.float64]:
        right, _, drawn = self.pixels.sum(axis=2).T
        return 1 - _share(right, drawn, 1.0)

    def words(self, row: int) -> Words:
        _, found, drawn = self.pixels[row]
        return Words(self._shares(drawn), self._shares(found))

    def _shares(self, pixels: NDArray[np.float64]) -> str:
        """The percentage of the pixels that is of each class but the first."""
        shares = 100 * pixels / max(pixels.sum(), 1)
        return ", ".join(f"{name} {share:.2g} %" for name, share in list(zip(self.classes, shares, strict=True))[1:])


class BorderPredictions(PixelPredictions):
    """Pixels on the found border of each class, those of them near the drawn one, and the same the other way round."""

    KINDS = ("found_near", "found", "drawn_near", "drawn")
    RATIOS = ("border_f1", "border_precision", "border_recall")
    """Harmonic mean of the two others; share of the found border near the drawn one; of the drawn near the found."""
    SCORES = BORDER_SCORES

    def ratios(self, pixels: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
        found_near, found, drawn_near, drawn = (pixels[..., place, :] for place in range(4))
        precision, recall = _share(found_near, found), _share(drawn_near, drawn)
        if kind == "border_f1":
            known = found + drawn > 0  # a border that is missing on one side is a score of 0
            precision, recall = np.nan_to_num(precision), np.nan_to_num(recall)
            return np.where(known, _share(2 * precision * recall, precision + recall, 0.0), np.nan)
        return {"border_precision": precision, "border_recall": recall}[kind]
