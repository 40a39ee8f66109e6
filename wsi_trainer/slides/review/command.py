"""`wsi-train tissue`: the masks of all slides, to be looked at and edited before anything is converted."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.slides.bar import slide_bar
from wsi_trainer.slides.identity import source_bytes
from wsi_trainer.slides.inputs import check_outlines, list_slides
from wsi_trainer.slides.pool import Failure, stall_seconds, work_on_all, workers_of
from wsi_trainer.slides.results import write_failures
from wsi_trainer.slides.review.one import EDITED, RECORDS, Looking
from wsi_trainer.slides.review.page import PAGE, Entry, write_page
from wsi_trainer.slides.rules.blur import Blur
from wsi_trainer.slides.rules.choice import Rules
from wsi_trainer.slides.rules.edge import Edge
from wsi_trainer.slides.rules.fold import Fold
from wsi_trainer.slides.rules.pale import Pale
from wsi_trainer.slides.rules.pen import Pen
from wsi_trainer.slides.settings import Settings
from wsi_trainer.slides.store.files import remove_half_written
from wsi_trainer.stopping import ends_at_once
from wsi_trainer.terminal import say

_MOST_FAILURES = 40


def tissue(
    slides: str,
    out: Path,
    rules: str = "usual",
    tissue: Literal["otsu", "geojson"] = "otsu",
    geojson: Path | None = None,
    source_mpp: float | None = None,
    crop: Literal["none", "bounds"] = "none",
    channel: str | None = None,
    to_8bit: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    stall_minutes: float | None = None,
    pale: Pale = Pale(),  # noqa: B008
    pen: Pen = Pen(),  # noqa: B008
    edge: Edge = Edge(),  # noqa: B008
    blur: Blur = Blur(),  # noqa: B008
    fold: Fold = Fold(),  # noqa: B008
) -> int:
    """Find the tissue of slides, and show it: a page of all masks, and outlines that QuPath edits.

    Nothing is converted. OUT/tissue.html has all thumbnails, those first from which rules took most. OUT/SLIDE.geojson
    has the tissue of each; edit it in QuPath, and convert with --tissue geojson --geojson OUT. The same command again
    goes on where it stopped, keeps what you edited, and shows it.

    Args:
        slides: A folder, a file, a quoted pattern, or a manifest CSV with a column slide (and perhaps mpp).
        out: Folder for outlines, thumbnails and the page.
        rules: What the mask leaves out: pen, edge, blur, fold, with commas; pale is put in. usual is pen and blur, all
            is all, none leaves the mask as it is.
        tissue: How the mask is made: otsu by colour, geojson from outlines that you drew or edited.
        geojson: Folder with SLIDE.geojson for --tissue geojson, by default beside the slides; or the file of one slide.
        source_mpp: Micrometres per pixel of the slides, where their files do not say it or say it wrong.
        crop: bounds looks only at the scanned part of slides whose canvas is larger (MRXS).
        channel: The channel of slides that have several, by its name in the file or its number from 0.
        to_8bit: LOW:HIGH, the values that become 0 and 255, for slides whose pixels have more than 8 bits: 0:4095.
        workers: Processes; the default is one for each core, at most 8.
        overwrite: Find all masks anew, also those that you edited.
        stall_minutes: A slide that makes no progress for so long is given up, reported, and the others go on: the
            default is 30, and 0 waits for ever. Not where there is one slide only.
        pale: Pale tissue that the threshold left out, which is put in.
        pen: Pen marks.
        edge: Edges of cover glass and rims of bubbles.
        blur: Tissue out of focus.
        fold: Folded tissue.

    Returns:
        0 if the tissue of all slides is found, 1 if some failed.
    """
    chosen = Rules.of(rules, pale, pen, edge, blur, fold)
    settings = Settings(
        source_mpp=source_mpp, tissue=tissue, geojson=geojson, crop=crop, channel=channel, to_8bit=to_8bit, rules=chosen
    )
    workers, stall = workers_of(workers), stall_seconds(stall_minutes)
    console = Console()
    jobs = [item.job for item in list_slides(slides, out, lambda text: say(console, text))]
    check_outlines(geojson, len(jobs))
    if geojson is not None and geojson.is_dir() and out.is_dir() and geojson.samefile(out):
        raise UserError(f"--geojson {geojson} is where the outlines would be written; give another folder for them")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made: {error.strerror}") from error
    for folder in (out, *{(out / RECORDS / job.name).parent for job in jobs}):
        remove_half_written(folder)
    entries: list[Entry] = []
    failures: list[Failure] = []
    sizes = [source_bytes(job.slide) if job.slide.exists() else 0 for job in jobs]
    with ends_at_once(), slide_bar(console, "looking at", sizes) as bar:
        work = Looking(out, settings, overwrite)
        outcomes = work_on_all(work, jobs, workers=workers, report=bar.part, stall=stall)
        with closing(outcomes):
            for number, outcome in outcomes:
                bar.finished(number)
                (failures if isinstance(outcome, Failure) else entries).append(outcome)  # type: ignore[arg-type]
    write_page(out / PAGE, out.resolve().name, entries, [(Path(f.slide).name, f.reason) for f in failures])
    write_failures(out, failures, None)
    for failure in failures[:_MOST_FAILURES]:
        say(console, f"{failure.slide}: {failure.reason} ({failure.kind})", lead="failed", lead_style="red")
    edited = sum(entry.note == EDITED for entry in entries)
    kept = f", {edited} of them edited by hand" if edited else ""
    say(console, f"{len(entries)} slides{kept}, {len(failures)} failed. Look at {out / PAGE}")
    return 1 if failures else 0
