"""Slides of a patient as one: what a step sees where `data.group` is patient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError


def by_patient(records: Sequence[SlideRecord], columns: Sequence[str] = ()) -> list[SlideRecord]:
    """One record for each patient, under its name, with the slides as `parts`; patients in the order of their first.

    Args:
        records: The slides.
        columns: Those of the task, in which slides of one patient have to agree; empty where there are no labels.

    Raises:
        UserError: Slides of a patient have different labels, sites or splits.
    """
    slides: dict[str, list[SlideRecord]] = {}
    for record in records:
        slides.setdefault(record.patient, []).append(record)
    for own in slides.values():
        for other in own[1:]:
            _check(own[0], other, columns)
    return [replace(own[0], slide=patient, parts=tuple(own)) for patient, own in slides.items()]


def _check(first: SlideRecord, other: SlideRecord, columns: Sequence[str]) -> None:
    """Refuse what no prediction of a patient can be compared with."""
    cells = {column: (first.cells.get(column, ""), other.cells.get(column, "")) for column in columns}
    for name, (one, two) in {**cells, "site": (first.site, other.site), "split": (first.split, other.split)}.items():
        if one != two:
            raise UserError(
                f"patient {first.patient} has {one!r} as {name} of slide {first.slide} and {two!r} of {other.slide}; "
                "with data.group: patient all slides of a patient have one, so give them that, or leave out data.group"
            )
