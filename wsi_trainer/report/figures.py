"""The figures of a report, as SVG pictures inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix

from wsi_trainer.metrics import SCORES, Predictions, roc_band

COLOURS = ("#1f5fa8", "#c2571a", "#4b7f3f", "#7a4fa0", "#8a6d3b", "#3f8f8f")
_GREY = "#8b9099"
_SIZE = (4.6, 3.7)


def data_uri(figure: Figure) -> str:
    """The figure as the address of a picture that needs no file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def roc(models: Mapping[str, Predictions]) -> str:
    """ROC curves of one or more models with the bands that hold 95 % of the resampled curves."""
    figure, axes = _figure("false positive rate", "true positive rate")
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle=":")
    for colour, (name, predictions) in zip(COLOURS, models.items(), strict=False):
        band = roc_band(predictions)
        axes.fill_between(band.false_positive_rate, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        label = f"{name}, AUC {SCORES['auc'](predictions):.3f}"
        axes.plot(band.false_positive_rate, band.true_positive_rate, color=colour, linewidth=1.8, label=label)
    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(-0.01, 1.01)
    axes.set_aspect("equal")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return data_uri(figure)


def training(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Loss over epochs: the training slides as a line, the validation slides dashed."""
    figure, axes = _figure("epoch", "loss")
    for colour, (name, columns) in zip(COLOURS, curves.items(), strict=False):
        for column, style, what in (("train_loss", "-", "training"), ("val_loss", "--", "validation")):
            values = np.asarray(columns.get(column, ()), dtype=float)
            if values.size:
                epochs = np.arange(1, values.size + 1)
                axes.plot(epochs, values, style, color=colour, linewidth=1.6, marker=".", label=f"{name}, {what}")
    axes.axhline(np.log(2), color=_GREY, linewidth=1, linestyle=":")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)
    return data_uri(figure)


def confusion(predictions: Predictions) -> str:
    """How many slides of each class are predicted as each class."""
    classes = range(len(predictions.classes))
    counts = confusion_matrix(predictions.labels, predictions.probabilities.argmax(axis=1), labels=classes)
    figure, axes = _figure("predicted", "label")
    axes.imshow(counts, cmap="Blues", vmin=0, vmax=max(int(counts.max()), 1))
    for (row, column), count in np.ndenumerate(counts):
        dark = count > counts.max() / 2
        axes.text(
            column,
            row,
            str(count),
            ha="center",
            va="center",
            color="white" if dark else "#1b1f24",
            fontsize=12,
        )
    axes.set_xticks(list(classes), predictions.classes)
    axes.set_yticks(list(classes), predictions.classes)
    axes.grid(False)
    return data_uri(figure)


def calibration(predictions: Predictions) -> str:
    """Share of positive slides against predicted probability, in bins of equally many slides."""
    figure, axes = _figure(f"predicted probability of {predictions.classes[1]}", "share of slides")
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle=":")
    bins = max(2, min(8, len(predictions) // 8))
    truth, predicted = predictions.labels == 1, predictions.probabilities[:, 1]
    share, mean = calibration_curve(truth, np.clip(predicted, 0, 1), n_bins=bins, strategy="quantile")
    axes.plot(mean, share, "o-", color=COLOURS[0], linewidth=1.6)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")
    return data_uri(figure)


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e8eb", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
