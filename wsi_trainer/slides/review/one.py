"""The mask of one slide, found without converting it: outlines, thumbnail, and a record of how they were made.

The record is written last, so what it describes is complete. Before outlines get their name it says which they will
be: wherever a run ends, its own outlines are known as such. Those that are no longer as they were written have been
edited by somebody: they are never written over, and are shown instead of what the rules say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_plugin import Box
from wsi_trainer.foreign import read_json
from wsi_trainer.places import Place
from wsi_trainer.places.geojson import PathClass
from wsi_trainer.segment.outlines import joined, pieces, write_outlines
from wsi_trainer.slides.convert import THUMBNAILS, Job
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.identity import quick_hash
from wsi_trainer.slides.overview import draw_overview, find_mask, mask_scale, outline_of
from wsi_trainer.slides.readers import open_reader
from wsi_trainer.slides.readers.cropped import crop_to_bounds, origin_of
from wsi_trainer.slides.resample import ScaledImage
from wsi_trainer.slides.resolution import resolve
from wsi_trainer.slides.review.overlay import SUFFIX, draw_overlay
from wsi_trainer.slides.review.page import Entry
from wsi_trainer.slides.rules.choice import Rules
from wsi_trainer.slides.rules.table import ROWS
from wsi_trainer.slides.settings import Settings
from wsi_trainer.slides.store.files import replace_file
from wsi_trainer.slides.store.manifest import sha256_of
from wsi_trainer.slides.tissue import REMOVED, Mask, TissueMask

RECORDS = "records"
TISSUE = PathClass("Tissue", (0, 160, 0))
EDITED = "edited by hand"
_BAND = 512  # rows of a mask whose outlines are joined at a time


@dataclass(frozen=True)
class Looking:
    """The work of a pool that finds masks. A mask is found by one thread and all at once, without progress."""

    out: Path
    settings: Settings
    overwrite: bool = False

    def __call__(self, job: Job, threads: int, progress: Callable[[int, int], None]) -> Entry:
        return look_at(job, self.out, self.settings, self.overwrite)


def look_at(job: Job, out: Path, settings: Settings, overwrite: bool = False) -> Entry:
    """Finds the mask of a slide, or finds that nothing is left to do.

    Raises:
        SlideError: The slide cannot be read, or has no resolution.
    """
    if not job.slide.exists():
        raise SlideError(job.slide, "does not exist")
    record, outlines = out / RECORDS / f"{job.name}.json", out / f"{job.name}.geojson"
    header = {"source": quick_hash(job.slide), "mpp": job.mpp, **_asked(settings)}
    if settings.tissue == "geojson":
        header["outlines"] = sha256_of(outline_of(job.slide, settings))
    known = _read(record)
    now = sha256_of(outlines) if outlines.is_file() else None
    ours = {known.get("written"), known.get("next")} - {None}
    edited = now is not None and bool(ours) and now not in ours and not overwrite
    if known.get("header") == header and known.get("shown") == now and not overwrite:
        return Entry(**known["entry"])
    if now is not None and not ours and not overwrite:
        raise SlideError(job.slide, f"{outlines} is another tool's; move it, or give --overwrite true")
    record.parent.mkdir(parents=True, exist_ok=True)

    def begin(next_ones: str) -> None:
        _note(record, {**known, "next": next_ones})

    entry = _made(job, out, _by_hand(settings, outlines) if edited else settings, outlines, None if edited else begin)
    shown = sha256_of(outlines)
    written = known.get("written") if edited else shown
    _note(record, {"header": header, "written": written, "shown": shown, "entry": vars(entry)})
    return entry


def _note(record: Path, facts: Mapping[str, Any]) -> None:
    replace_file(record, (json.dumps(facts, indent=1) + "\n").encode())


def _asked(settings: Settings) -> dict[str, Any]:
    """What decides a mask."""
    keys = ("source_mpp", "tissue", "crop", "channel", "to_8bit", "rules")
    return {key: value for key, value in settings.record().items() if key in keys}


def _by_hand(settings: Settings, outlines: Path) -> Settings:
    return replace(settings, tissue="geojson", geojson=outlines, rules=Rules())


def _read(record: Path) -> Mapping[str, Any]:
    try:
        known = read_json(record)
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):  # damaged by a crash: made anew
        return {}


def _made(
    job: Job, out: Path, settings: Settings, outlines: Path, begin: Callable[[str], None] | None
) -> Entry:  # fmt: skip
    """Finds the mask and writes all but the record. ``begin`` hears of outlines that are about to get their name; None
    keeps those that are there."""
    with open_reader(job.slide, options=settings.reading) as opened:
        reader = crop_to_bounds(opened) if settings.crop == "bounds" else opened
        resolution = resolve(job.slide, reader.info, settings.source_mpp, job.mpp)
        mpp = (resolution.y, resolution.x)
        mask, picture = find_mask(job.slide, reader, ScaledImage(reader, 1.0), mpp, settings)
        place = Place(opened.info.shape, origin_of(reader)).coarser(mask_scale(mpp))
    assert mask is not None  # the command asks for one
    thumbnail = out / THUMBNAILS / f"{job.name}.jpg"
    thumbnail.parent.mkdir(parents=True, exist_ok=True)
    outlines.parent.mkdir(parents=True, exist_ok=True)
    draw_overview(picture, mask, thumbnail)
    if mask.found:
        draw_overlay(mask, thumbnail.with_suffix(SUFFIX))
    if begin is not None:
        _write_outlines(outlines, mask, place, begin)
    folder = f"{THUMBNAILS}/{job.name}"
    note = EDITED if begin is None else "; ".join(reader.info.notes)
    return Entry(
        job.name, f"{folder}.jpg", f"{folder}{SUFFIX}" if mask.found else None, mask.share, mask.shares(), note
    )


def _write_outlines(path: Path, mask: TissueMask, place: Place, begin: Callable[[str], None]) -> None:
    """Tissue, and in classes of their own what rules took: remove their class in QuPath to have it back."""
    found = {TISSUE: _polygons(mask.mask)}
    for row in ROWS:
        if row.name in mask.found and not row.adds:
            found[PathClass(f"{REMOVED}: {row.name}", row.colour)] = _polygons(mask.found[row.name])
    partial = path.with_name(path.name + ".part")
    write_outlines(partial, found, place)
    begin(sha256_of(partial))
    partial.replace(path)


def _polygons(mask: Mask) -> list[Any]:
    parts = []
    for top in range(0, mask.shape[0], _BAND):
        rows = mask[top : top + _BAND]
        if rows.any():
            parts += pieces(np.asarray(rows), Box((top, 0), (top + len(rows), mask.shape[1])))
    return joined(parts)
