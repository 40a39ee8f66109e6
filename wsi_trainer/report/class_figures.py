"""The figures of predictions of classes: ROC, precision over recall, confusion, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wsi_trainer.metrics import Predictions, calibration, confusion, pr_band, roc_band
from wsi_trainer.metrics.scores import area_under_roc, precision_averaged
from wsi_trainer.report.figures import COLOURS, GREY, data_uri, new_figure, unit_square


class Curve(NamedTuple):
    """One class of one model against the rest."""

    name: str
    predictions: Predictions
    positive: int

    @property
    def defined(self) -> bool:
        """Whether there are slides of the class and others."""
        truth = self.predictions.labels == self.positive
        return bool(truth.any() and not truth.all())


def roc(curves: Sequence[Curve]) -> str:
    """ROC curves with the bands that hold 95 % of the resampled curves."""
    figure, axes = new_figure("false positive rate", "true positive rate")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for colour, (name, predictions, positive) in zip(COLOURS, curves, strict=False):
        band = roc_band(predictions, positive)
        area = area_under_roc(predictions.labels == positive, predictions.probabilities[:, positive])
        axes.fill_between(band.false_positive_rate, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        label = f"{name}, AUC {area:.3f}"
        axes.plot(band.false_positive_rate, band.true_positive_rate, color=colour, linewidth=1.8, label=label)
    unit_square(axes)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return data_uri(figure)


def precision_recall(curves: Sequence[Curve]) -> str:
    """Precision over recall with the bands that hold 95 % of the resampled curves; dotted: a model without any aim."""
    figure, axes = new_figure("recall", "precision")
    for colour, (name, predictions, positive) in zip(COLOURS, curves, strict=False):
        band = pr_band(predictions, positive)
        mean = precision_averaged(predictions.labels == positive, predictions.probabilities[:, positive])
        axes.axhline(band.prevalence, color=colour, linewidth=1, linestyle=":")
        axes.fill_between(band.recall, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(band.recall, band.precision, color=colour, linewidth=1.8, label=f"{name}, AP {mean:.3f}")
    unit_square(axes)
    axes.legend(loc="lower left", fontsize=8, frameon=False)
    return data_uri(figure)


def confusion_matrix(predictions: Predictions) -> str:
    """How many slides of each class are predicted as each class."""
    counts = confusion(predictions)
    figure, axes = new_figure("predicted", "label")
    axes.imshow(counts, cmap="Blues", vmin=0, vmax=max(int(counts.max()), 1))
    for (row, column), count in np.ndenumerate(counts):
        colour = "white" if count > counts.max() / 2 else "#1b1f24"
        axes.text(column, row, str(int(count)), ha="center", va="center", color=colour, fontsize=12)
    classes = range(len(predictions.classes))
    axes.set_xticks(list(classes), predictions.classes)
    axes.set_yticks(list(classes), predictions.classes)
    axes.grid(False)
    return data_uri(figure)


def reliability(curves: Sequence[Curve]) -> str:
    """Share of slides with the class against its predicted probability, with 95 % intervals of the shares."""
    figure, axes = new_figure("predicted probability", "share of slides")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for colour, (name, predictions, positive) in zip(COLOURS, curves, strict=False):
        found = calibration(predictions, positive)
        if len(curves) == 1:
            axes.vlines(found.said, found.low, found.high, color=colour, alpha=0.4, linewidth=1.4)
        axes.plot(found.said, found.happened, "o-", color=colour, linewidth=1.6, markersize=4, label=name)
    unit_square(axes)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    return data_uri(figure)
