"""Found against drawn regions: borders and lesions, with intervals by patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Self

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy.ndimage import label, maximum
from scipy.spatial import KDTree

from lightning_plugin import Box, TileSource
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.fit.result import LESION_SCORES, LESIONS
from wsi_trainer.fit.scoring import owners_of, write_lesions
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import BORDER_SCORES, MISSED, BorderPredictions, Marks, summarise
from wsi_trainer.regions.shapes import hits, joined, pieces
from wsi_trainer.regions.target import IGNORED, blocks_of

LESION_BLOCK = 4096
"""Pixels of a block."""

Points = NDArray[np.float64]
"""Rows of x, y and probability, at centres of pixels."""


def drawn_lesions(drawn: TileSource, classes: int, side: int = LESION_BLOCK) -> list[list[shapely.Polygon]]:
    """The lesions of each class but the first, in pixels of the image; it is read where a border runs."""
    parts: list[list[shapely.Polygon]] = [[] for _ in range(1, classes)]
    for box in blocks_of(drawn.shape[2], drawn.shape[3], side):
        value = drawn.constant(box)
        if value is None:
            values = drawn.read(box)[0, 0].numpy()
            for place, found in enumerate(parts, start=1):
                found += pieces(values == place, box.lo)
        elif 0 < int(value) < classes:
            (top, left), (bottom, right) = box.lo, box.hi
            parts[int(value) - 1].append(shapely.box(left, top, right, bottom))
    return [joined(found) for found in parts]


def near_joined(
    lesions: Sequence[shapely.Polygon], pixel: tuple[float, float], distance: float
) -> list[shapely.Polygon]:
    """Lesions as CAMELYON16 evaluates them: grown by half the distance, so that those within it are one, and filled.

    Args:
        lesions: Polygons in pixels of the image.
        pixel: Its height and width in micrometres.
        distance: Micrometres.
    """
    size = np.array([pixel[1], pixel[0]])
    grown = [shapely.transform(one, lambda corners: corners * size).buffer(distance / 2, 32) for one in lesions]
    rings = shapely.get_exterior_ring(shapely.get_parts(shapely.union_all(grown)))
    filled = shapely.get_parts(shapely.union_all(shapely.polygons(rings)))  # what lay in a hole is part of it now
    return [shapely.transform(one, lambda corners: corners / size) for one in filled]


def highest(mask: NDArray[np.bool_], probability: NDArray[np.float32], box: Box) -> Points:
    """The most probable pixel of each piece of a block; of several that are, the first row by row."""
    labels, count = label(mask)
    if not count:
        return np.empty((0, 3))
    best = np.concatenate([[np.inf], np.atleast_1d(maximum(probability, labels, np.arange(1, count + 1)))])
    rows, columns = np.nonzero(mask)
    piece = labels[rows, columns]
    equal = np.flatnonzero(probability[rows, columns] == best[piece])
    _, first = np.unique(piece[equal], return_index=True)
    rows, columns = rows[equal[first]], columns[equal[first]]
    return np.stack([columns + box.lo[1] + 0.5, rows + box.lo[0] + 0.5, probability[rows, columns]], axis=1)


def detections(regions: Sequence[shapely.Polygon], points: Points) -> Points:
    """The most probable point of each region, whatever pieces it was found in."""
    which, region = shapely.STRtree(regions).query(shapely.points(points[:, :2]), predicate="intersects")
    x, y, probability = points[which].T
    order = np.lexsort((x, y, -probability, region))
    _, first = np.unique(region[order], return_index=True)
    return points[which[order[first]]]


def marked(lesions: Sequence[shapely.Polygon], found: Points, drawn: TileSource) -> Marks:
    """The lesions with the probability of what was detected in each, and the false positives."""
    scores, missed = hits(lesions, shapely.points(found[:, :2]), found[:, 2], MISSED)
    outside = [p for x, y, p in found[missed].tolist() if _value(drawn, x, y) != IGNORED]
    return Marks(scores, np.array(outside, np.float64))


def _value(drawn: TileSource, x: float, y: float) -> int:
    row, column = int(y), int(x)
    return int(drawn.read(Box((row, column), (row + 1, column + 1))))


BORDER_BLOCK = 1024
"""Pixels of a block."""
_EQUAL = 1e-9
"""Of the tolerance and of a pixel: what is as far as the tolerance says is near."""

Mask = NDArray[np.bool_]


def border_pixels(
    found: Any, drawn: TileSource, classes: int, pixel: tuple[float, float], tolerance: float, side: int = BORDER_BLOCK
) -> NDArray[np.float64]:
    """(4, classes): what `BorderPredictions` counts of a slide.

    Args:
        found: An array (height, width) of the places of the pixels' classes, of which boxes are read.
        drawn: The same as it was drawn, or `IGNORED`.
        classes: How many there are.
        pixel: Height and width of a pixel in micrometres.
        tolerance: Micrometres from the centre of one pixel to that of another.
        side: Pixels of a block.
    """
    height, width = drawn.shape[2:]
    halo = [ceil(tolerance / step) + 1 for step in pixel]
    total = np.zeros((len(BorderPredictions.KINDS), classes))
    for box in blocks_of(height, width, side):
        grown = Box(
            (max(box.lo[0] - halo[0], 0), max(box.lo[1] - halo[1], 0)),
            (min(box.hi[0] + halo[0], height), min(box.hi[1] + halo[1], width)),
        )
        inner = tuple(slice(lo - start, hi - start) for lo, hi, start in zip(box.lo, box.hi, grown.lo))
        (top, left), (bottom, right) = grown.lo, grown.hi
        said = np.asarray(found[top:bottom, left:right])
        everywhere = drawn.constant(grown)
        if everywhere is not None and (int(everywhere) == IGNORED or (said == int(everywhere)).all()):
            continue  # most of a slide: there is no border
        truth = drawn.read(grown)[0, 0].numpy()
        said = np.where(truth == IGNORED, truth, said)
        present = sum(np.bincount(values.ravel(), minlength=classes)[:classes] > 0 for values in (truth, said))
        for place in np.flatnonzero(present).tolist():
            borders = [border(values, place) for values in (said, truth)]
            total[:, place] += _near(borders, inner, pixel, tolerance)
    return total


def border(values: NDArray[np.uint8], place: int) -> Mask:
    """The pixels of a class that have a neighbour of another one."""
    mask = values == place
    other = ~mask & (values != IGNORED)
    beside = np.zeros_like(mask)
    for here, there in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
        beside[here] |= other[there]
        beside[:, here] |= other[:, there]
    return mask & beside


def _near(borders: Sequence[Mask], inner: tuple[slice, ...], pixel: tuple[float, float], tolerance: float) -> list[int]:
    """Pixels of each border in the inner part that are near the other one, and all."""
    counts = []
    most = tolerance + _EQUAL * (tolerance + min(pixel))
    starts = [part.start for part in inner]
    for own, other in (borders, borders[::-1]):
        mine, theirs = np.argwhere(own[inner]) + starts, np.argwhere(other)
        away = KDTree(theirs * pixel).query(mine * pixel, distance_upper_bound=most)[0] if len(theirs) else np.inf
        counts += [int(np.isfinite(np.broadcast_to(away, len(mine))).sum()), len(mine)]
    return counts


BORDERS = "borders.csv"


@dataclass(frozen=True, eq=False)
class Judged:
    """Comparison of a slide's found regions with its drawn ones."""

    marks: tuple[Marks, ...]
    """Of each class but the first."""
    borders: NDArray[np.float64] | None
    """The counts of `BorderPredictions`; None where the size of a pixel is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Its numbers, for JSON."""
        marks = [[one.lesions.tolist(), one.false.tolist()] for one in self.marks]
        return {"marks": marks, "borders": None if self.borders is None else self.borders.tolist()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The comparison with these numbers."""
        marks = tuple(Marks(*(np.array(values, np.float64) for values in one)) for one in record["marks"])
        return cls(marks, None if record["borders"] is None else np.array(record["borders"]))


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
