"""Figures as SVG pictures inside the page: training, and those of each kind of predictions."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from wsi_trainer.metrics import (
    ClassPredictions,
    LesionPredictions,
    Predictions,
    PredictionsError,
    RiskPredictions,
    ValuePredictions,
    auc,
)
from wsi_trainer.metrics.classes import average_precision, confusion
from wsi_trainer.metrics.curves import FIRST, LAST, Band, benefit_band, calibration, froc_band, pr_band, roc_band
from wsi_trainer.metrics.intervals import too_few
from wsi_trainer.metrics.lesions import RATES, froc
from wsi_trainer.metrics.operating import benefit_of_all
from wsi_trainer.metrics.values import kaplan_meier, kaplan_meier_band, log_rank

COLOURS = ("#1f5fa8", "#c2571a", "#4b7f3f", "#7a4fa0", "#8a6d3b", "#3f8f8f")
GREY = "#8b9099"
_SIZE = (4.6, 3.7)


def of_predictions(runs: Mapping[str, Predictions]) -> Iterator[tuple[str, str]]:
    """Captions and pictures of what one or more runs predict of the same slides; those of one are of the first."""
    name, first = next(iter(runs.items()))
    for target, predictions in first.by_target.items():
        own = {run: its.by_target[target] for run, its in runs.items()}
        before = f"{target}: " if len(first.by_target) > 1 else ""
        for figure in predictions.FIGURES if len(predictions) else ():
            caption, draw = FIGURES[figure]
            if picture := draw(own):
                yield before + caption.format(name), picture


def training(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Loss over epochs: the training slides as a line, the validation slides dashed."""
    figure, axes = new_figure("epoch", "loss")
    for colour, (name, columns) in zip(COLOURS, curves.items(), strict=False):
        for column, style, what in (("train_loss", "-", "training"), ("val_loss", "--", "validation")):
            values = np.asarray(columns.get(column, ()), dtype=float)
            if values.size:
                epochs = np.arange(1, values.size + 1)
                axes.plot(epochs, values, style, color=colour, linewidth=1.6, marker=".", label=f"{name}, {what}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)
    return data_uri(figure)


def lesions(runs: Mapping[str, LesionPredictions]) -> str | None:
    """FROC: a curve for each run where there are two classes, else one for each class of the first."""
    first = next(iter(runs.values()))
    several = len(first.classes) > 1
    curves = {name: first.of(name) for name in first.classes} if several else runs
    bands = {name: (band, froc(its)) for name, its in curves.items() if (band := froc_band(its))}
    figure, axes = new_figure("false positives for each slide", "share of lesions detected")
    for colour, (name, (band, score)) in zip(COLOURS, bands.items(), strict=False):
        _draw(axes, band, colour, f"{name}, FROC {score:.3f}", step="post")
    axes.set_xscale("log", base=2)
    axes.set_xlim(FIRST, LAST)
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.set_major_locator(FixedLocator(list(RATES.values())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(RATES.values()), list(RATES))
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return data_uri(figure) if bands else None


def _curves(runs: Mapping[str, Any]) -> dict[str, ClassPredictions]:
    """The runs where there are two classes, else each class of the first run against the rest."""
    first = next(iter(runs.values()))
    if first.KIND != ClassPredictions.KIND or len(first.classes) > 2:
        runs = {name: first.of(name) for name in first.classes}
    return {name: its for name, its in runs.items() if 0 < its.labels.sum() < len(its)}


def _roc(runs: Mapping[str, Any]) -> str | None:
    figure, axes = new_figure("false positive rate", "true positive rate")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    curves = _curves(runs)
    for colour, (name, its) in zip(COLOURS, curves.items(), strict=False):
        _draw(axes, roc_band(its), colour, f"{name}, AUC {auc(its):.3f}")
    return _in_square(figure, axes, "lower right") if curves else None


def _precision_recall(runs: Mapping[str, Any]) -> str | None:
    """Precision over recall; dotted: the prevalence, which is the precision of a random classifier."""
    figure, axes = new_figure("recall", "precision")
    curves = _curves(runs)
    for colour, (name, its) in zip(COLOURS, curves.items(), strict=False):
        axes.axhline(its.labels.mean(), color=colour, linewidth=1, linestyle=":")
        _draw(axes, pr_band(its), colour, f"{name}, AP {average_precision(its):.3f}")
    return _in_square(figure, axes, "lower left") if curves else None


def _calibration(runs: Mapping[str, Any]) -> str | None:
    """Share of slides with the class against its predicted probability, with 95 % intervals of the shares."""
    figure, axes = new_figure("predicted probability", "share of slides")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    curves = _curves(runs)
    for colour, (name, its) in zip(COLOURS, curves.items(), strict=False):
        found = calibration(its)
        if len(curves) <= 2 and not too_few(its):
            axes.vlines(found.said, found.low, found.high, color=colour, alpha=0.4, linewidth=1.4)
        axes.plot(found.said, found.happened, "o-", color=colour, linewidth=1.6, markersize=4, label=name)
    return _in_square(figure, axes, "upper left") if curves else None


def _decision_curve(runs: Mapping[str, Any]) -> str | None:
    """Net benefit over the threshold, by patient; dotted: acting on everybody, and on nobody."""
    figure, axes = new_figure("probability from which on one acts", "net benefit")
    patients = {name: its.by_patient() for name, its in _curves(runs).items()}
    curves = {name: its for name, its in patients.items() if 0 < its.labels.sum() < len(its)}
    for colour, (name, its) in zip(COLOURS, curves.items(), strict=False):
        band, prevalence = benefit_band(its), float((its.labels == 1).mean())
        axes.plot(band.x, benefit_of_all(prevalence, band.x), color=colour, linewidth=1, linestyle=":")
        _draw(axes, band, colour, name)
    axes.axhline(0, color=GREY, linewidth=1, linestyle=":")
    highest = max([float((its.labels == 1).mean()) for its in curves.values()], default=1)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.25 * highest, 1.1 * highest)
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    return data_uri(figure) if curves else None


def _confusion(runs: Mapping[str, Any]) -> str:
    """Counts of slides by label and predicted class."""
    predictions: ClassPredictions = next(iter(runs.values()))
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


def _scatter(runs: Mapping[str, Any]) -> str:
    """Predicted against true numbers; on the dotted line both are the same."""
    predictions: ValuePredictions = next(iter(runs.values()))
    figure, axes = new_figure("true", "predicted")
    both = np.concatenate([predictions.targets, predictions.values])
    ends = [both.min(), both.max()]
    axes.plot(ends, ends, color=GREY, linewidth=1, linestyle=":")
    axes.plot(predictions.targets, predictions.values, "o", color=COLOURS[0], markersize=4, alpha=0.7)
    return data_uri(figure)


def _survival(runs: Mapping[str, Any]) -> str | None:
    """Kaplan-Meier curves of the patients of higher and of lower risk, numbers at risk below; of all where training's
    median risk is not known.

    Ticks: last seen without the event. Bands as there are p values: not of few patients. None where slides of a
    patient contradict each other.
    """
    try:
        patients: RiskPredictions = next(iter(runs.values())).by_patient()
    except PredictionsError:
        return None
    figure, axes = new_figure("time", "share of patients without event")
    high, groups = patients.higher, [(GREY, "all, training's median risk is not known", np.ones(len(patients), bool))]
    if high is not None:
        groups = [(COLOURS[1], "higher risk", high), (COLOURS[0], "lower risk", ~high)]
    last = float(patients.times.max())
    at = [time for time in axes.xaxis.get_major_locator().tick_values(0, last) if 0 <= time <= last]
    for line, (colour, name, rows) in enumerate(groups):
        times, events = patients.times[rows], patients.events[rows]
        if not len(times):
            continue
        happened, shares = kaplan_meier(times, events)
        label = f"{name}: {len(times)} patients, {int(events.sum())} events"
        axes.step(np.append(happened, times.max()), np.append(shares, shares[-1]), where="post",
                  color=colour, label=label)  # fmt: skip
        if not too_few(patients.take(np.flatnonzero(rows))):
            lower, upper = (np.append(one, one[-1]) for one in kaplan_meier_band(times, events))
            axes.fill_between(np.append(happened, times.max()), lower, upper, step="post", color=colour, alpha=0.15,
                              linewidth=0)  # fmt: skip
        seen = times[~events]
        share = shares[np.searchsorted(happened, seen, side="right") - 1]
        axes.plot(seen, share, "|", color=colour, markersize=8)
        for time in at:
            axes.annotate(str(int((times >= time).sum())), (time, 0), (0, -34 - 11 * line), color=colour, fontsize=8,
                          xycoords=("data", "axes fraction"), textcoords="offset points", ha="center")  # fmt: skip
    axes.set_xlabel("time; below, patients at risk", labelpad=36)
    if high is not None:
        axes.plot([], [], " ", label=f"log-rank: {_p_of(patients, high)}")
    axes.set_xticks(at)
    axes.set_ylim(-0.02, 1.02)
    figure.legend(loc="outside upper left", fontsize=8, frameon=False)  # curves may be anywhere inside
    return data_uri(figure)


def _p_of(patients: RiskPredictions, high: NDArray[np.bool_]) -> str:
    """p of the two groups, or why there is none."""
    if absent := too_few(patients):
        return absent.replace("interval", "p")
    p = log_rank(patients.times, patients.events, high)
    return "not defined" if np.isnan(p) else f"p = {p:.2g}"


FIGURES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str | None]]] = {
    "roc": ("ROC, bands hold 95 % of bootstrap resamples", _roc),
    "precision_recall": ("Precision and recall, bands likewise", _precision_recall),
    "calibration": ("Calibration, bars hold 95 % of the share", _calibration),
    "decision_curve": (
        "Decision curve by patient, bands likewise; dotted: acting on everybody, on nobody",
        _decision_curve,
    ),
    "confusion": ("Confusion, {}", _confusion),
    "scatter": ("Predicted against true", _scatter),
    "survival": (
        "Survival by predicted risk, cut at the median risk of the training patients; below, patients at risk; "
        "bands hold 95 % at each time",
        _survival,
    ),
}
"""Captions and drawers, by the names of `Predictions.FIGURES`."""


def _draw(axes: Axes, band: Band, colour: str, label: str, step: Any = None) -> None:
    if band.absent:
        label += f"; {band.absent.replace('interval', 'band')}"
    else:
        axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.15, linewidth=0, step=step)
    axes.plot(band.x, band.y, color=colour, linewidth=1.8, label=label, drawstyle="steps-post" if step else "default")


def _in_square(figure: Figure, axes: Axes, legend: Any) -> str:
    """The picture with both axes from 0 to 1, with a little room."""
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")
    axes.legend(loc=legend, fontsize=8, frameon=False)
    return data_uri(figure)


def data_uri(figure: Figure) -> str:
    """The figure as the address of a picture that needs no file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def new_figure(x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure with named axes."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e8eb", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
