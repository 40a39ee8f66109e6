"""What a report shows of found regions: tables of borders and lesions, and FROC curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator

from wsi_trainer.fit.lesion_scores import LESIONS, read_scores
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.metrics import LesionPredictions, froc_band
from wsi_trainer.metrics.froc import FIRST, LAST, RATES, froc
from wsi_trainer.report.figures import COLOURS, data_uri, new_figure


@dataclass(frozen=True)
class Regions:
    """How regions of the slides of a split compare with those that are drawn."""

    name: str
    """Of the run."""
    scores: dict[str, Any]
    lesions: LesionPredictions

    @staticmethod
    def load(name: str, folder: RunFolder, split: str) -> Regions | None:
        """Those of a run, or of its maps; None where it has none of the split."""
        for place in (folder.segments, folder.heatmaps):
            if scores := read_scores(place, split):
                return Regions(name, scores, LesionPredictions.read(place / LESIONS))
        return None

    def tables(self) -> list[tuple[str, Any]]:
        """Captions, and scores with their intervals by class."""
        found = []
        if "borders" in self.scores:
            caption = f"Borders by class, within {self.scores['tolerance']:g} µm"
            found.append((caption, self.scores["borders"]["per_class"]))
        caption = "Lesions detected by class, at so many false positives for each slide"
        return [*found, (caption, self.scores["lesions"]["per_class"])]


def froc_figure(runs: Sequence[Regions]) -> str | None:
    """A curve for each run where there are two classes, else one for each class of the first; None without lesions."""
    first = runs[0].lesions
    several = len(first.classes) > 1
    curves = {name: first.of(name) for name in first.classes} if several else {r.name: r.lesions for r in runs}
    figure, axes = new_figure("false positives for each slide", "share of lesions detected")
    drawn = False
    for colour, (name, lesions) in zip(COLOURS, curves.items(), strict=False):
        band = froc_band(lesions)
        if band is None:
            continue
        drawn = True
        axes.fill_between(band.false_positives, band.low, band.high, color=colour, alpha=0.15, linewidth=0, step="post")
        axes.step(
            band.false_positives,
            band.sensitivity,
            where="post",
            color=colour,
            linewidth=1.8,
            label=f"{name}, FROC {froc(lesions):.3f}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(FIRST, LAST)
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.set_major_locator(FixedLocator(list(RATES.values())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(RATES.values()), list(RATES))
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return data_uri(figure) if drawn else None
