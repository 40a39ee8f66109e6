"""Figures as SVG pictures inside the page, and the one that every run has: its training."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = ("#1f5fa8", "#c2571a", "#4b7f3f", "#7a4fa0", "#8a6d3b", "#3f8f8f")
GREY = "#8b9099"
_SIZE = (4.6, 3.7)


def data_uri(figure: Figure) -> str:
    """The figure as the address of a picture that needs no file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


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


def unit_square(axes: Axes) -> None:
    """Both axes from 0 to 1, with a little room."""
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")


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
