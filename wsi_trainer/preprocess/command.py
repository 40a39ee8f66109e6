"""`wsi-train preprocess`: slides in, checked OME-Zarr stores and a table of them out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.display import is_text, say
from wsi_trainer.io.files import LOCKS, Locked, lock
from wsi_trainer.signals import Stopped, ends_at_once
from wsi_trainer.slide.identity import source_bytes
from wsi_trainer.slide.mask import OVERLAY
from wsi_trainer.store.convert import ASSOCIATED, NGFF04, THUMBNAILS, Converted, Job, Options, Settings, convert
from wsi_trainer.store.export import export_ngff04, save_associated

from .inputs import Listed, check_outlines, is_table, list_slides, part_of
from .pool import Failure, stall_seconds, work_on_all, work_on_dask, workers_of
from .results import PAGE, Entry, make_folder, show, show_notes, slide_bar, write_failures, write_page
from .stores import TEMPLATE, find_stores, listed_in, unlisted, write_stores


def preprocess(
    slides: str,
    out: Path,
    workers: int | None = None,
    overwrite: bool = False,
    export_ngff: Literal["0.4"] | None = None,
    scheduler: str | None = None,
    shard: str | None = None,
    stall_minutes: float | None = None,
    copy_associated: bool = False,
    **options: Any,
) -> int:
    """Convert slides to zarr: checked, resumable, background for free.

    What was interrupted continues where it stopped when the same command is given again; what is converted is
    not touched. A slide that cannot be converted is reported in OUT/failures.csv and the others go on. Train with your
    own manifest and --data.stores OUT. Without a manifest of yours OUT/manifest.csv is written once for you to
    complete, and never again.

    Args:
        slides: A folder, a file, a quoted pattern, or a manifest CSV with a column slide (and perhaps mpp).
        out: Folder for the stores, stores.csv, failures.csv and thumbnails.
        workers: Processes; the default is one for each core, at most 8.
        overwrite: Make stores anew that were made with other settings; each stays until the new one is complete.
        export_ngff: 0.4 also writes OUT/ngff-0.4/NAME.zarr, for software that reads no OME-Zarr 0.5. Copies that
            are there follow their stores without this too.
        scheduler: dask for a local Dask cluster, or the address of a Dask scheduler.
        shard: i/n converts the i-th of n parts of the slides, for job arrays.
        stall_minutes: A slide that takes longer, and two seconds more for each MiB of its file, is given up, reported,
            and the others go on: the default is 30, and 0 waits for ever. Not where there is one slide only.
        copy_associated: Also save each slide's label and macro image to OUT/associated. They may show the name of
            the patient, so without this they are never read.
        **options: How slides are converted.

    Returns:
        0 if all slides are converted, 1 if some failed.
    """
    settings = Settings(**vars(Options(**options)))
    stall, workers = stall_seconds(stall_minutes), workers_of(workers)
    console = Console()
    listed = list_slides(slides, out, lambda text: say(console, text))
    part = part_of(listed, shard)
    check_outlines(settings.geojson, len(listed))
    make_folder(out)
    listed_in(out)  # refuses a folder in which a file of somebody else would be replaced, before any work
    with ends_at_once():
        jobs, failures = _readable(part)
        done: list[int] = []
        new = 0
        try:
            with slide_bar(console, "converting", [_size(job) for job in jobs]) as bar:
                folder = out if scheduler is None else out.resolve()
                conversion = partial(convert, out=folder, settings=settings, overwrite=overwrite)
                if scheduler is None:
                    outcomes = work_on_all(conversion, jobs, workers=workers, report=bar.part, stall=stall)
                else:
                    outcomes = work_on_dask(
                        conversion, jobs, workers=workers, report=bar.part, address=scheduler, stall=stall
                    )
                with closing(outcomes):
                    for number, outcome in outcomes:
                        bar.finished(number)
                        if isinstance(outcome, Failure):
                            failures.append(outcome)
                        else:
                            done.append(number)
                            new += not outcome.skipped
        except Stopped:
            with suppress(UserError):  # the next run says so too
                write_stores(out)
            raise
        converted = [jobs[number] for number in sorted(done)]
        if copy_associated:
            failures += _copy_associated(out, converted, settings)
        failures += _export(console, out, _copied(out, converted, export_ngff is not None))
        write_failures(out, failures, shard)  # what only this job knows comes before the tables that jobs share
        listing = write_stores(out)
        _show_masks(out, listing.stores, failures)
        failed = {failure.slide for failure in failures}
        names = [item.job.name for item in listed if str(item.job.slide) not in failed]
        missing = unlisted(out, names, template=not is_table(slides))
        there = {job.name for job in converted}
        show(console, [row for row in listing.stores if row.name in there], failures)
        show_notes(console, out, listing, missing)
        how = f"{slides} --data.stores {out}" if is_table(slides) else f"{out / TEMPLATE}, when it has your labels"
        end = f"; reasons are in {out}/failures*.csv" if failures else ""
        train = f". Train with --data.manifest {how}" if converted else ""
        say(console, f"{len(converted)} converted ({new} now), {len(failures)} failed{end}{train}")
    return 1 if failures else 0


def _show_masks(out: Path, stores: Sequence[Converted], failures: Sequence[Failure]) -> None:
    """Writes the page of all masks of the folder."""
    entries = []
    for row in stores:
        thumbnail = f"{THUMBNAILS}/{row.name}.jpg"
        if row.tissue is not None and (out / thumbnail).is_file():
            overlay = f"{THUMBNAILS}/{row.name}{OVERLAY}" if row.rules else None
            entries.append(Entry(row.name, thumbnail, overlay, row.tissue, row.rules, row.note))
    if entries:
        write_page(out / PAGE, out.resolve().name, entries, [(Path(f.slide).name, f.reason) for f in failures])


LONGEST_NAME = 200
"""Bytes of the name of a store; a file system takes 255, endings of results and of unfinished files included."""


def _readable(part: Sequence[Listed]) -> tuple[list[Job], list[Failure]]:
    """The slides that are there, and a failure for each other: a list may have a million."""
    jobs, failures = [], []
    for job in (item.job for item in part):
        if not is_text(job.name):
            failures.append(Failure(str(job.slide), SlideError.__name__, "its name is not UTF-8; rename it"))
        elif max(map(len, os.fsencode(job.name).split(b"/"))) > LONGEST_NAME:
            failures.append(
                Failure(str(job.slide), SlideError.__name__, f"its name is longer than {LONGEST_NAME} bytes; rename it")
            )
        elif not os.path.exists(job.slide):
            failures.append(Failure(str(job.slide), SlideError.__name__, "does not exist"))
        else:
            jobs.append(job)
    return jobs, failures


def _copied(out: Path, converted: Sequence[Job], wanted: bool) -> list[Job]:
    """The stores to copy: all of this run where copies are wanted, and all that have a copy, which follows them."""
    folder = out / NGFF04
    there = find_stores(folder) if folder.is_dir() else {}
    names = dict.fromkeys([*(job.name for job in converted if wanted), *there])
    return [Job(out / f"{name}.zarr", name) for name in names if (out / f"{name}.zarr").is_dir()]


def _export(console: Console, out: Path, jobs: Sequence[Job]) -> list[Failure]:
    """Brings copies up to date with their stores."""
    failures: list[Failure] = []
    if not jobs:
        return failures
    with slide_bar(console, "exporting", [_size(job) for job in jobs]) as bar:
        for number, job in enumerate(jobs):
            target = out / NGFF04 / f"{job.name}.zarr"
            try:
                with lock(out / LOCKS / f"{job.name}.{NGFF04}.lock"):
                    export_ngff04(out / f"{job.name}.zarr", target)
            except Locked:
                pass  # another run makes it
            except (UserError, OSError, ValueError, KeyError) as error:  # the last two: a damaged store
                failures.append(Failure(str(job.slide), "Export", f"{target}: {error}"))
            bar.finished(number)
    return failures


def _copy_associated(out: Path, jobs: Sequence[Job], settings: Settings) -> list[Failure]:
    """Saves the label and macro images of all slides; what cannot be read is a failure like others."""
    failures = []
    for job in jobs:
        try:
            save_associated(job.slide, out / ASSOCIATED / job.name, settings.reading)
        except (UserError, OSError) as error:
            failures.append(Failure(str(job.slide), type(error).__name__, str(error)))
    return failures


def _size(job: Job) -> int:
    try:
        return source_bytes(job.slide)
    except OSError:  # the conversion says why
        return 0
