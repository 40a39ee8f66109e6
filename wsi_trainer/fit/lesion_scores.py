"""The files that say how many lesions were detected, beside the regions or the maps that were compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wsi_trainer.data import SlideRecord
from wsi_trainer.fit.evaluate import owners_of
from wsi_trainer.fit.run_folder import read_json
from wsi_trainer.metrics import FROC_SCORES, LesionPredictions, Marks, summarise

SCORES = "scores.json"
LESIONS = "lesions.csv"


def write_lesions(
    folder: Path,
    records: Sequence[SlideRecord],
    marks: Sequence[tuple[Marks, ...]],
    classes: Sequence[str],
    resamples: int,
) -> dict[str, Any]:
    """Write the marks of each slide and class as lesions.csv; returns FROC with its intervals, for scores.json."""
    owners = owners_of(records)
    lesions = LesionPredictions.of_slides(owners.slides, owners.patients, tuple(classes), marks, owners.sites)
    lesions.write(folder / LESIONS)
    return summarise(lesions, FROC_SCORES, resamples)


def read_scores(folder: Path, split: str) -> dict[str, Any]:
    """What scores.json says of a split; empty where there is nothing."""
    scores = read_json(folder / SCORES)
    return scores if scores.get("split") == split else {}
