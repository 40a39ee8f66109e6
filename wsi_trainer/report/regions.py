"""Tables of borders and lesions of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wsi_trainer.fit.run import LESIONS, Run, read_lesion_scores
from wsi_trainer.metrics import LesionPredictions


@dataclass(frozen=True)
class Regions:
    """How regions of the slides of a split compare with those that are drawn."""

    name: str
    """Of the run."""
    scores: dict[str, Any]
    lesions: LesionPredictions

    @staticmethod
    def load(name: str, folder: Run, split: str) -> Regions | None:
        """Those of a run, or of its maps; None where it has none of the split."""
        for place in (folder.segments, *folder.mapped):
            if scores := read_lesion_scores(place, split):
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
