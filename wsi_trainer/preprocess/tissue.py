"""`wsi-train tissue`: the masks of all slides, to be looked at and edited before anything is converted.

The record of a slide has the checksums of its outlines, and is written before these get their name: wherever a run
ends, its own outlines are known as such. Others have been edited by somebody: they are never written over, and are
shown instead of the rules' result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.display import say
from wsi_trainer.io.files import sha256_of, write_json
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.regions.geojson import PathClass, write_outlines
from wsi_trainer.regions.shapes import joined, pieces
from wsi_trainer.signals import ends_at_once
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.identity import SlideId, same_header, source_bytes
from wsi_trainer.slide.mask import OVERLAY, MaskOptions, draw_overlay, draw_overview, find_mask, outline_of
from wsi_trainer.slide.rules import RULES
from wsi_trainer.slide.slide import ScaledImage
from wsi_trainer.slide.tissue import REMOVED, Mask, TissueMask
from wsi_trainer.store.convert import THUMBNAILS, Job

from .inputs import check_outlines, list_slides
from .pool import Failure, Progress, stall_seconds, work_on_all, workers_of
from .results import PAGE, Entry, make_folder, show, slide_bar, write_failures, write_page

RECORDS = "records"
TISSUE = PathClass("Tissue", (0, 160, 0))
EDITED = "edited by hand"
_BAND = 512  # rows of a mask whose outlines are joined at a time


def tissue(
    slides: str,
    out: Path,
    workers: int | None = None,
    overwrite: bool = False,
    stall_minutes: float | None = None,
    rules: str = "usual",
    **options: Any,
) -> int:
    """Find the tissue of slides, and show it: a page of all masks, and outlines that QuPath edits.

    Nothing is converted. OUT/tissue.html has all thumbnails, those first from which rules took most. OUT/SLIDE.geojson
    has the tissue of each; edit it in QuPath, and convert with --tissue geojson --geojson OUT. The same command again
    goes on where it stopped, keeps what you edited, and shows it.

    Args:
        slides: A folder, a file, a quoted pattern, or a manifest CSV with a column slide (and perhaps mpp).
        out: Folder for outlines, thumbnails and the page.
        workers: Processes; the default is one for each core, at most 8.
        overwrite: Find all masks anew, also those that you edited.
        stall_minutes: A slide that takes longer, and two seconds more for each MiB of its file, is given up, reported,
            and the others go on: the default is 30, and 0 waits for ever. Not where there is one slide only.
        rules: Rules that take pen, edge, blur, fold out of the mask, with commas; pale is put in. usual is pen and
            blur, all is all, none leaves the mask as it is.
        **options: How slides are read, and how their tissue is found.

    Returns:
        0 if the tissue of all slides is found, 1 if some failed.
    """
    settings = MaskOptions(rules=rules, **options)
    geojson = settings.geojson
    if settings.tissue == "none":
        raise UserError("--tissue none makes no mask: give --tissue otsu or geojson")
    workers, stall = workers_of(workers), stall_seconds(stall_minutes)
    console = Console()
    jobs = [item.job for item in list_slides(slides, out, lambda text: say(console, text))]
    check_outlines(geojson, len(jobs))
    if geojson is not None and geojson.is_dir() and out.is_dir() and geojson.samefile(out):
        raise UserError(f"--geojson {geojson} is where the outlines would be written; give another folder for them")
    make_folder(out)
    entries: list[Entry] = []
    failures: list[Failure] = []
    sizes = [source_bytes(job.slide) if job.slide.exists() else 0 for job in jobs]
    with ends_at_once(), slide_bar(console, "looking at", sizes) as bar:
        work = partial(find_one, out=out, settings=settings, overwrite=overwrite)
        outcomes = work_on_all(work, jobs, workers=workers, report=bar.part, stall=stall)
        with closing(outcomes):
            for number, outcome in outcomes:
                bar.finished(number)
                (failures if isinstance(outcome, Failure) else entries).append(outcome)  # type: ignore[arg-type]
    write_page(out / PAGE, out.resolve().name, entries, [(Path(f.slide).name, f.reason) for f in failures])
    write_failures(out, failures, None)
    show(console, [], failures)
    edited = sum(entry.note == EDITED for entry in entries)
    kept = f", {edited} of them edited by hand" if edited else ""
    say(console, f"{len(entries)} slides{kept}, {len(failures)} failed. Look at {out / PAGE}")
    return 1 if failures else 0


def find_one(
    job: Job,
    out: Path,
    settings: MaskOptions,
    overwrite: bool = False,
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> Entry:
    """Finds the mask of a slide, by one thread and all at once, or finds that nothing is left to do.

    Raises:
        SlideError: The slide cannot be read, or has no resolution.
    """
    if not job.slide.exists():
        raise SlideError(job.slide, "does not exist")
    record, outlines = out / RECORDS / f"{job.name}.json", out / f"{job.name}.geojson"
    header = {"source": SlideId.of(job.slide).content, "mpp": job.mpp, **settings.decides_mask()}
    if settings.tissue == "geojson":
        header["outlines"] = sha256_of(outline_of(job.slide, settings))
    known = _read(record)
    now = sha256_of(outlines) if outlines.is_file() else None
    ours = known.get("ours", [])
    edited = now is not None and bool(ours) and now not in ours and not overwrite
    if same_header(known.get("header"), header, job.slide) and known.get("shown") == now and not overwrite:
        return Entry(**known["entry"])
    if now is not None and not ours and not overwrite:
        raise SlideError(job.slide, f"{outlines} is another tool's; move it, or give --overwrite true")
    mask, place, entry = _drawn(job, out, settings.drawn_in(outlines) if edited else settings)
    if edited:
        entry = replace(entry, note=EDITED)
        write_json(record, {"header": header, "ours": ours, "shown": now, "entry": vars(entry)})
        return entry
    partial = outlines.with_name(f"{outlines.name}.part")
    outlines.parent.mkdir(parents=True, exist_ok=True)
    _write_outlines(partial, mask, place)
    shown = sha256_of(partial)
    write_json(record, {"header": header, "ours": [now, shown], "shown": shown, "entry": vars(entry)})
    partial.replace(outlines)
    return entry


def _read(record: Path) -> Mapping[str, Any]:
    try:
        known = read_json(record)
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):  # damaged by a crash: made anew
        return {}


def _drawn(job: Job, out: Path, settings: MaskOptions) -> tuple[TissueMask, SlideTransform, Entry]:
    """Finds the mask of a slide and draws it; returns it with its place in the slide and its entry on the page."""
    with settings.open(job.slide, job.mpp) as slide:
        mask, picture = find_mask(slide, ScaledImage(slide, 1.0), slide.need_resolution(), settings)
        place = SlideTransform(slide.whole.shape, slide.origin)
        notes = "; ".join(slide.info.notes)
    assert mask is not None  # the command asks for one
    thumbnail = out / THUMBNAILS / f"{job.name}.jpg"
    thumbnail.parent.mkdir(parents=True, exist_ok=True)
    draw_overview(picture, mask, thumbnail)
    if mask.found:
        draw_overlay(mask, thumbnail.with_suffix(OVERLAY))
    overlay = f"{THUMBNAILS}/{job.name}{OVERLAY}" if mask.found else None
    entry = Entry(job.name, f"{THUMBNAILS}/{job.name}.jpg", overlay, mask.share, mask.shares(), notes)
    return mask, place.coarser(mask.scale), entry


def _write_outlines(path: Path, mask: TissueMask, place: SlideTransform) -> None:
    """Tissue, and in classes of their own what rules took: remove their class in QuPath to have it back."""
    found = {TISSUE: _polygons(mask.mask)}
    for rule in RULES:
        if rule.name in mask.found and not rule.adds:
            found[PathClass(f"{REMOVED}: {rule.name}", rule.colour)] = _polygons(mask.found[rule.name])
    write_outlines(path, found, place)


def _polygons(mask: Mask) -> list[Any]:
    parts = []
    for top in range(0, mask.shape[0], _BAND):
        rows = mask[top : top + _BAND]
        if rows.any():
            parts += pieces(np.asarray(rows), (top, 0))
    return joined(parts)
