"""`wsi-train preprocess`: slides in, checked OME-Zarr stores and a manifest out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from wsi_trainer.errors import UserError

from .associated import FOLDER as ASSOCIATED
from .associated import save_associated
from .bar import slide_bar
from .convert import Job
from .identity import source_bytes
from .inputs import list_slides, part_of
from .pool import Failure, Outcome, Report, run_all
from .results import show, write_results
from .settings import Settings

_STALL = 30 * 60.0  # seconds


def preprocess(
    slides: str,
    out: Path,
    mpp: float | None = None,
    source_mpp: float | None = None,
    workers: int | None = None,
    codec: Literal["zstd", "jpeg"] = "zstd",
    tissue: Literal["otsu", "none", "geojson"] = "otsu",
    geojson: Path | None = None,
    background: Literal["keep", "constant"] = "keep",
    levels: int | None = None,
    crop: Literal["none", "bounds"] = "none",
    channel: str | None = None,
    to_8bit: str | None = None,
    export_ngff: Literal["0.4"] | None = None,
    overwrite: bool = False,
    scheduler: str | None = None,
    shard: str | None = None,
    stall_minutes: float | None = None,
    copy_associated: bool = False,
) -> int:
    """Convert slides to zarr: checked, resumable, background for free.

    What was interrupted continues where it stopped when the same command is given again; what is converted is
    not touched. A slide that cannot be converted is reported in OUT/failures.csv and the others go on.

    Args:
        slides: A folder, a file, a quoted pattern, or a manifest CSV with a column slide (and perhaps mpp).
        out: Folder for the stores, manifest.csv, failures.csv, summary.csv and thumbnails.
        mpp: Micrometres per pixel of the result. Without it pixels stay as they are, bit for bit.
        source_mpp: Micrometres per pixel of the slides, where their files do not say it or say it wrong.
        workers: Processes; the default is one for each core, at most 8.
        codec: zstd is lossless and read by everything; jpeg is a fifth of the size and read by wsi-train only.
        tissue: How the tissue mask is made.
        geojson: Folder with SLIDE.geojson for --tissue geojson; by default beside the slides.
        background: constant paints all that is not tissue white, so that it costs nothing in training.
        levels: Levels of the pyramid; by default down to 512 px.
        crop: bounds converts only the scanned part of slides whose canvas is larger (MRXS); positions in micrometres
            stay those of the slide.
        channel: The channel to convert of slides that have several, by its name in the file or its number from 0.
        to_8bit: LOW:HIGH, the values that become 0 and 255, for slides whose pixels have more than 8 bits: 0:4095.
        export_ngff: 0.4 also writes OUT/ngff-0.4/NAME.zarr, for software that reads no OME-Zarr 0.5.
        overwrite: Make stores anew that were made with other settings.
        scheduler: dask for a local Dask cluster, or the address of a Dask scheduler.
        shard: i/n converts the i-th of n parts of the slides, for job arrays.
        stall_minutes: A slide that makes no progress for so long is given up, reported, and the others go on: the
            default is 30, and 0 waits for ever. Not with --scheduler, nor where there is one slide only.
        copy_associated: Also save each slide's label and macro image to OUT/associated. They may show the name of
            the patient, so without this they are never read.

    Returns:
        0 if all slides are converted, 1 if some failed.
    """
    settings = Settings(
        mpp, source_mpp, codec, tissue, geojson, background, levels, crop, channel=channel, to_8bit=to_8bit
    )
    stall = _stall_seconds(stall_minutes, scheduler)
    console = Console()
    listed = list_slides(slides, out, lambda text: console.print(Text(text), soft_wrap=True))
    part = part_of(listed, shard)
    _make_folder(out)
    jobs = [item.job for item in part]
    workers = workers or min(8, os.cpu_count() or 1)
    if workers < 1:
        raise UserError(f"--workers {workers}: expected 1 or more")
    failures: list[Failure] = []
    new = 0
    with slide_bar(console, "converting", [_size(job) for job in jobs]) as bar:
        for number, outcome in _outcomes(jobs, out, settings, workers, overwrite, scheduler, stall, bar.part):
            bar.finished(number)
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                new += not outcome.skipped
    if copy_associated:
        failures += _copy_associated(out, jobs, settings)
    done = write_results(out, listed, failures, shard)
    if export_ngff is not None:
        _export(console, out, [job for job in jobs if (out / f"{job.name}.zarr").exists()])
    show(console, out, done, failures, new)
    return 1 if failures else 0


def _stall_seconds(minutes: float | None, scheduler: str | None) -> float | None:
    if minutes is None:
        return _STALL
    if scheduler is not None:
        raise UserError("--stall_minutes works without --scheduler only: Dask does not end a task that hangs")
    if not 0 <= minutes < float("inf"):
        raise UserError(f"--stall_minutes {minutes:g}: expected minutes, or 0 to wait for ever")
    return minutes * 60 or None


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made: {error.strerror}") from error


def _outcomes(
    jobs: Sequence[Job], out: Path, settings: Settings, workers: int, overwrite: bool, scheduler: str | None,
    stall: float | None, report: Report,
) -> Iterator[tuple[int, Outcome]]:  # fmt: skip
    if scheduler is None:
        return run_all(jobs, out, settings, workers=workers, overwrite=overwrite, report=report, stall=stall)
    from .dask import run_on_dask

    address = None if scheduler == "dask" else scheduler
    return run_on_dask(jobs, out, settings, address=address, workers=workers, overwrite=overwrite, report=report)


def _export(console: Console, out: Path, jobs: Sequence[Job]) -> None:
    from .export import FOLDER, export_ngff04

    with slide_bar(console, "exporting", [_size(job) for job in jobs]) as bar:
        for number, job in enumerate(jobs):
            target = out / FOLDER / f"{job.name}.zarr"
            target.parent.mkdir(parents=True, exist_ok=True)
            export_ngff04(out / f"{job.name}.zarr", target)
            bar.finished(number)


def _copy_associated(out: Path, jobs: Sequence[Job], settings: Settings) -> list[Failure]:
    """Saves the label and macro images of all slides; what cannot be read is a failure like others."""
    failures = []
    for job in jobs:
        if (out / f"{job.name}.zarr").exists():
            try:
                save_associated(job.slide, out / ASSOCIATED / job.name, settings.reading)
            except UserError as error:
                failures.append(Failure(str(job.slide), type(error).__name__, str(error)))
    return failures


def _size(job: Job) -> int:
    return source_bytes(job.slide) if job.slide.exists() else 0
