"""Lesions that the outlines of a map point at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import shapely

from wsi_trainer.data import SlideRecord
from wsi_trainer.explain.outlines import Outline
from wsi_trainer.explain.regions import Rings
from wsi_trainer.fit.evaluate import write_lesions
from wsi_trainer.fit.run import LESION_SCORES, LESIONS
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import MISSED, Marks


def is_known(record: SlideRecord, regions: Sequence[Rings], target: str, classes: Sequence[str]) -> bool:
    """Whether all lesions of a slide are drawn: some are, or its label says that it has none."""
    return bool(regions) or (record.label in classes and record.label != target)


def marks_of(found: Sequence[Outline], regions: Sequence[Rings], stride: int) -> Marks:
    """What outlines detect: a lesion is, if the position with the largest value of an outline meets it.

    Args:
        found: The outlines of a map.
        regions: What is drawn, in pixels of the image; what overlaps is one lesion.
        stride: Pixels of the image for one position.
    """
    drawn = shapely.union_all([shapely.make_valid(shapely.Polygon(outer, holes)) for outer, *holes in regions])
    lesions = [part for part in shapely.get_parts(drawn) if part.area]
    x, y = np.array([one.at for one in found]).reshape(-1, 2).T
    values = np.array([one.largest for one in found])
    reach = stride / 2
    squares = shapely.box(x - reach, y - reach, x + reach, y + reach)
    which, lesion = shapely.STRtree(lesions).query(squares, predicate="intersects")
    scores = np.full(len(lesions), MISSED)
    np.maximum.at(scores, lesion, values[which])
    return Marks(scores, np.delete(values, which))


def write_detected(
    folder: Path, records: Sequence[SlideRecord], marks: Mapping[str, Marks], target: str, split: str, resamples: int
) -> None:
    """Write lesions.csv and scores.json of the slides on which all lesions are known; those of earlier maps go."""
    for name in (LESIONS, LESION_SCORES):
        (folder / name).unlink(missing_ok=True)
    known = [record for record in records if record.slide in marks]
    if any(len(marks[record.slide].lesions) for record in known):
        found = write_lesions(folder, known, [(marks[record.slide],) for record in known], [target], resamples)
        write_json(folder / LESION_SCORES, {"split": split, "lesions": found})
