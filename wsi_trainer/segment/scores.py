"""What was found on slides against what was drawn on them: borders and lesions, with intervals by patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from lightning_plugin import TileSource
from wsi_trainer.data import SlideRecord
from wsi_trainer.fit.evaluate import owners_of, write_lesions
from wsi_trainer.fit.run import LESION_SCORES, LESIONS
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import BORDER_SCORES, BorderPredictions, Marks, summarise
from wsi_trainer.segment.borders import border_pixels
from wsi_trainer.segment.lesions import Points, detections, drawn_lesions, marked, near_joined

BORDERS = "borders.csv"


@dataclass(frozen=True, eq=False)
class Judged:
    """What was found on a slide against what was drawn on it."""

    marks: tuple[Marks, ...]
    """Of each class but the first."""
    borders: NDArray[np.float64] | None
    """What `BorderPredictions` counts; None where nobody knows how large a pixel is."""


def judge(
    labels: Any,
    regions: Sequence[Sequence[shapely.Polygon]],
    points: Sequence[Points],
    drawn: TileSource,
    pixel: tuple[float, float] | None,
    tolerance: float,
    join: float = 0.0,
) -> Judged:
    """Compare a slide.

    Args:
        labels: The found classes, an array (height, width).
        regions: The found regions of each class but the first, in pixels of the image.
        points: Where in them each class is most probable.
        drawn: The classes as they were drawn.
        pixel: Its height and width in micrometres; None where nobody knows them.
        tolerance: Micrometres by which a found border may be off.
        join: Micrometres within which lesions are one; needs the size of a pixel.
    """
    classes = len(regions) + 1
    lesions = drawn_lesions(drawn, classes)
    if join and pixel is not None:
        lesions = [near_joined(those, pixel, join) for those in lesions]
    found = [detections(its, where) for its, where in zip(regions, points, strict=True)]
    return Judged(
        tuple(marked(those, these, drawn) for those, these in zip(lesions, found, strict=True)),
        None if pixel is None else border_pixels(labels, drawn, classes, pixel, tolerance),
    )


def write_scores(
    folder: Path,
    records: Sequence[SlideRecord],
    judged: Mapping[str, Judged],
    classes: Sequence[str],
    facts: Mapping[str, Any],
    resamples: int,
) -> dict[str, Any]:
    """Write borders.csv, lesions.csv, and scores.json with all scores and their intervals; returns the latter.

    Args:
        folder: Where the found regions are; scores of an earlier run are removed.
        records: The slides.
        judged: Slide by slide the comparison, of those on which something may be drawn.
        classes: Their names; the first is background.
        facts: What else scores.json says.
        resamples: For the intervals.
    """
    for name in (BORDERS, LESIONS, LESION_SCORES):
        (folder / name).unlink(missing_ok=True)
    known = [record for record in records if record.slide in judged]
    if not known:
        return {}
    marks = [judged[record.slide].marks for record in known]
    scores = {**facts, "lesions": write_lesions(folder, known, marks, classes[1:], resamples)}
    counted = {record.slide: judged[record.slide].borders for record in known}
    pixels = [found for found in counted.values() if found is not None]
    if pixels:
        owners = owners_of([record for record in known if counted[record.slide] is not None])
        borders = BorderPredictions(owners.slides, owners.patients, tuple(classes), np.stack(pixels), owners.sites)
        borders.write(folder / BORDERS)
        scores["borders"] = summarise(borders, BORDER_SCORES, resamples)
    scores["without_micrometres"] = [slide for slide, found in counted.items() if found is None]
    write_json(folder / LESION_SCORES, scores)
    return scores
