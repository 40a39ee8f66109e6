"""The figures of predictions without classes: of a number, and of survival."""

from __future__ import annotations

import numpy as np

from wsi_trainer.metrics import RiskPredictions, ValuePredictions, kaplan_meier
from wsi_trainer.report.figures import COLOURS, GREY, data_uri, new_figure


def scatter(predictions: ValuePredictions) -> str:
    """Predicted against true numbers; on the dotted line both are the same."""
    figure, axes = new_figure("true", "predicted")
    both = np.concatenate([predictions.targets, predictions.values])
    ends = [both.min(), both.max()]
    axes.plot(ends, ends, color=GREY, linewidth=1, linestyle=":")
    axes.plot(predictions.targets, predictions.values, "o", color=COLOURS[0], markersize=4, alpha=0.7)
    return data_uri(figure)


def survival(predictions: RiskPredictions) -> str:
    """Kaplan-Meier curves of the halves with the higher and the lower risk; ticks: last seen without the event."""
    figure, axes = new_figure("time", "share without event")
    high = predictions.risks > np.median(predictions.risks)
    for colour, name, rows in ((COLOURS[1], "higher risk", high), (COLOURS[0], "lower risk", ~high)):
        if not rows.any():
            continue
        times, events = predictions.times[rows], predictions.events[rows]
        at, share = kaplan_meier(times, events)
        axes.step(np.append(at, times.max()), np.append(share, share[-1]), where="post", color=colour,
                  label=f"{name}: {len(times)} slides, {int(events.sum())} events")  # fmt: skip
        seen = times[~events]
        axes.plot(seen, share[np.searchsorted(at, seen, side="right") - 1], "|", color=colour, markersize=8)
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=8, frameon=False)
    return data_uri(figure)
