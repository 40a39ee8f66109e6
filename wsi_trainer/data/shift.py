"""Shift: in what the slides of a cohort are unlike those of training, and by how much."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_trainer.data.covariates import is_missing
from wsi_trainer.data.manifest import PATHS, SlideRecord
from wsi_trainer.errors import SlideError

LOOKED_AT = 100
"""Slides of either side that are opened, spread evenly over the list."""
THUMBNAIL = 512
APART = 0.5
"""Standard deviations between two means from which on a number is unlike."""
OTHER = 0.1
"""Share of slides with a value that training lacks, or of further empty cells, from which on a column is unlike."""
MOST_VALUES = 20
"""Different values from which on a column is no category."""
LEAST_NUMBERS = 5
STAINS = np.linalg.inv(np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]]))
"""From optical densities to haematoxylin, eosin and the rest (Ruifrok and Johnston, 2001)."""
NUMBERS = ("haematoxylin", "eosin", "µm a pixel", "share of tissue")
Facts = dict[str, float | str | None]


@dataclass(frozen=True)
class Unlike:
    """One fact of slides, in training and in the cohort."""

    name: str
    training: str
    cohort: str
    distance: float
    """Between means in standard deviations; of categories and empty cells the share of slides, times five."""
    unlike: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def shift(training: Sequence[SlideRecord], cohort: Sequence[SlideRecord], targets: Collection[str]) -> list[Unlike]:
    """Facts of slides in which both can be compared, the most unlike first.

    Args:
        training: The slides of training.
        cohort: The other slides.
        targets: Columns of the labels, which are not compared here.
    """
    sides = [[facts_of(record) for record in spread(records)] for records in (training, cohort)]
    found = []
    for name in dict.fromkeys(key for side in sides for facts in side for key in facts):
        ours, theirs = ([facts[name] for facts in side if facts.get(name) is not None] for side in sides)
        if ours and theirs:
            found.append(compared(name, ours, theirs))
    found += of_columns(training, cohort, targets)
    return sorted(found, key=lambda one: (not one.unlike, -one.distance))


def spread(records: Sequence[SlideRecord], count: int = LOOKED_AT) -> list[SlideRecord]:
    """`count` records, evenly over the list; all where there are no more."""
    places = np.linspace(0, len(records) - 1, min(count, len(records)))
    return [records[int(place)] for place in places]


def facts_of(record: SlideRecord) -> Facts:
    """Scanner, size of a pixel, tissue and stains of a slide; none of one that cannot be opened, or is gone."""
    if not record.path.exists():
        return {}
    try:
        with record.open() as slide:
            resolution, info = slide.resolution, slide.info
            found: Facts = {
                "scanner or format": info.vendor,
                "µm a pixel": None if resolution is None else round(resolution.mean, 4),
            }
            mask, picture = slide.tissue().mask, slide.thumbnail(THUMBNAIL)
    except SlideError:
        return {}
    shape = Image.fromarray(mask).resize(picture.shape[1::-1], Image.Resampling.NEAREST)
    return found | {"share of tissue": float(mask.mean())} | stains(picture, np.asarray(shape))


def stains(picture: NDArray[np.uint8], tissue: NDArray[np.bool_]) -> Facts:
    """Mean optical densities of haematoxylin and eosin on the tissue."""
    if not tissue.any():
        return {}
    density = -np.log10(np.maximum(picture[tissue].astype(float), 1) / 255)
    haematoxylin, eosin, _ = (density @ STAINS).mean(axis=0).tolist()
    return {"haematoxylin": haematoxylin, "eosin": eosin}


def compared(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> Unlike:
    """A number by its mean and spread, anything else by the shares of its values."""
    if all(isinstance(value, float) for value in (*ours, *theirs)):
        one, other = np.array(ours), np.array(theirs)
        spread = float(np.sqrt((one.var() + other.var()) / 2))
        gap = float(other.mean() - one.mean())
        floor = max(1e-3 * abs(float(one.mean())), 1e-9)  # equal numbers have no spread
        distance = abs(gap) / max(spread, floor)
        said = [f"{side.mean():.3g} ± {side.std():.2g}" for side in (one, other)]
        return Unlike(name, said[0], said[1], min(distance, 99.0), bool(distance > APART))
    new = sum(value not in set(ours) for value in theirs) / len(theirs)
    return Unlike(name, shares(ours), shares(theirs), 5 * new, new > OTHER)


def shares(values: Sequence[str]) -> str:
    """The values and their shares, the most frequent first."""
    names, counts = np.unique(np.array(values, dtype=object).astype(str), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:4]
    more = f", {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"{names[place]} {100 * counts[place] / len(values):.0f} %" for place in order) + more


def of_columns(
    training: Sequence[SlideRecord], cohort: Sequence[SlideRecord], targets: Collection[str]
) -> Iterator[Unlike]:
    """The manifest's further columns: empty cells, and what is in them."""
    names = dict.fromkeys(name for record in (*training, *cohort) for name in columns_of(record))
    for name in names:
        if name in targets or name in PATHS or name in ("mpp", "site"):  # sites are different by their names
            continue
        absent = [all(name not in columns_of(record) for record in side) for side in (training, cohort)]
        cells = [[_known(columns_of(record).get(name, "")) for record in side] for side in (training, cohort)]
        empty = [sum(not cell for cell in side) / len(side) for side in cells]
        if max(empty) > 0 and min(empty) < 1:
            said = ["absent" if gone else f"{100 * part:.0f} % empty" for gone, part in zip(absent, empty, strict=True)]
            more = empty[1] - empty[0]
            what = f"{name} ({'absent' if any(absent) else 'empty'})"
            yield Unlike(what, said[0], said[1], 5 * abs(more), abs(more) > OTHER)
        values = [[cell for cell in side if cell] for side in cells]
        if not all(values):
            continue
        numbers = [[number for cell in side if (number := as_number(cell)) is not None] for side in values]
        if all(len(some) == len(every) >= LEAST_NUMBERS for some, every in zip(numbers, values, strict=True)):
            yield compared(name, *numbers)
        elif len(set(values[0]) | set(values[1])) <= MOST_VALUES:
            yield compared(name, *values)


def _known(cell: str) -> str:
    """The cell, empty where it is missing."""
    return "" if is_missing(cell, None) else cell


def columns_of(record: SlideRecord) -> Mapping[str, str]:
    """The site and all further cells of a line of the manifest."""
    return {"site": record.site, "label": record.label, **record.others}


def as_number(cell: str) -> float | None:
    """The number in a cell, where there is one."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if np.isfinite(value) else None
