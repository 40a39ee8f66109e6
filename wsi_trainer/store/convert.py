"""Conversion of one slide: options, and from any reader to a finished, checked OME-Zarr store.

Work goes on in a staging folder with a journal. The store appears under its name in one rename, when it is
complete; so whatever has that name is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from wsi_trainer import __version__
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.files import LOCKS, Locked, lock, remove, sha256_of, sync_folder, sync_tree, write_json
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.slide.geometry import KEY, PROVENANCE, SlideTransform
from wsi_trainer.slide.identity import SlideId, full_hash, same_header
from wsi_trainer.slide.mask import OVERLAY, MaskOptions, check_mpp, draw_overlay, draw_overview, find_mask, outline_of
from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.store.chunks import Layout, StoredLevel, ZstdCodec, pyramid
from wsi_trainer.store.manifest import Journal, read_manifest, write_manifest
from wsi_trainer.store.ngff import group, image_array, image_attributes, write_label
from wsi_trainer.store.writer import ChunkCutter, PyramidWriter, drop_missing

FORMAT = 1
"""Changes whenever the same settings give other bytes, so that old and new shards are never mixed."""
MOST_LEVELS = 24
"""More than the largest slide there can be has, down to one pixel."""


@dataclass(frozen=True, kw_only=True)
class Options(MaskOptions):
    """Options for converting slides."""

    mpp: float | None = None
    """Micrometres per pixel of the result. Without it pixels stay as they are, bit for bit."""
    background: Literal["keep", "constant"] = "keep"
    """constant paints all that is not tissue white, so that it costs nothing in training."""
    levels: int | None = None
    """Levels of the pyramid; by default down to 512 px."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background == "constant" and self.tissue == "none":
            raise UserError("--background constant needs a tissue mask: give --tissue otsu or --tissue geojson")
        if self.levels is not None and not 1 <= self.levels <= MOST_LEVELS:
            raise UserError(f"--levels {self.levels}: expected 1 to {MOST_LEVELS}; each is half of the one before")
        check_mpp("mpp", self.mpp)


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """All that decides a conversion. Equal settings give equal stores."""

    chunk: int = 512
    """Side of what is read at once, in pixels."""
    shard: int = 4096
    """Side of what is written at once and is one file."""
    compression: int = 3
    """Level of zstd."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.layout
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def layout(self) -> Layout:
        """Sizes of chunks and shards."""
        return Layout(self.chunk, self.shard)

    def record(self) -> Mapping[str, Any]:
        """The entries that a store keeps: all that decides its bytes, nothing of this machine."""
        names = ("mpp", "background", "levels", "chunk", "shard", "compression")
        return {"format": FORMAT, "codec": "zstd"} | self.decides_mask() | {name: getattr(self, name) for name in names}


STAGING, THUMBNAILS, ASSOCIATED, NGFF04 = LOCKS, "thumbnails", "associated", "ngff-0.4"
"""Folders that `preprocess` makes beside stores."""
_COMPARED = 16
"""Boxes of a store that are compared with its slide."""


@dataclass(frozen=True)
class Job:
    """One slide to convert."""

    slide: Path
    name: str
    mpp: float | None = None


@dataclass(frozen=True)
class Converted:
    """Result of a conversion: a row of stores.csv."""

    name: str
    store: str
    height: int
    width: int
    mpp: float | None  # None where pixels are not square: the note says more
    levels: int
    tissue: float | None
    lost: float | None
    skipped: bool
    note: str = ""
    rules: Mapping[str, float] = field(default_factory=dict)
    """Area that each rule removed or added, as a share of the mask before it."""
    source: str = ""
    """SHA-256 of the slide's file: equal for a slide that was renamed or copied."""


class Busy(SlideError):
    """Another process converts this slide right now."""


def convert(
    job: Job,
    out: Path,
    settings: Settings,
    *,
    threads: int = 1,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Converts a slide, continues a conversion that was interrupted, or finds that nothing is left to do.

    Args:
        job: The slide.
        out: The folder of stores; the slide's is `out/NAME.zarr`.
        settings: Options of the conversion.
        threads: Number of shards that are worked on at the same time.
        overwrite: Make a store anew that exists with other settings or from another file.
        progress: Called with finished and all pixels of level 0.

    Raises:
        SlideError: The slide cannot be converted; says why.
    """
    if not job.slide.exists():
        raise SlideError(job.slide, "does not exist")
    store = out / f"{job.name}.zarr"
    slide, result = job.slide.resolve(), store.resolve()
    if slide == result or result in slide.parents:  # a source is never replaced by what is made of it
        raise SlideError(job.slide, "it would be replaced by its own result; give another folder for the results")
    header = {"source": SlideId.of(job.slide).content, "mpp": job.mpp, **settings.record()}
    if settings.tissue == "geojson":  # outlines that were edited make another store
        header["outlines"] = sha256_of(outline_of(job.slide, settings))
    journal = out / STAGING / f"{job.name}.journal"
    try:
        with lock(out / LOCKS / f"{job.name}.lock"):
            if skipped := store.exists() and _fits(store, header, job, overwrite):
                journal.unlink(missing_ok=True)
            else:
                with settings.open(job.slide, job.mpp) as opened:
                    _Conversion(job, opened, out, settings, header, threads, progress).run(journal)
                journal.unlink()
            return _row(job, store, skipped=skipped)
    except Locked as error:
        raise Busy(job.slide, "another process is converting it") from error


def _fits(store: Path, header: Mapping[str, Any], job: Job, overwrite: bool) -> bool:
    """True if a store equals the one to be made; an error where it does not and may not be replaced."""
    try:
        fits = same_header(read_manifest(store)["settings"]["header"], header, job.slide)
    except (ValueError, KeyError, TypeError) as error:
        if overwrite:
            return False
        raise SlideError(job.slide, f"{store}: {error}; remove the store and run again") from error
    if not fits and not overwrite:
        raise SlideError(
            job.slide, f"{store} was made from another file, with other settings or with other outlines of tissue; "
            "choose another folder or give --overwrite true"
        )  # fmt: skip
    return fits


def stored(job: Job, out: Path) -> Converted | None:
    """The row of a slide that was converted before, or None."""
    store = out / f"{job.name}.zarr"
    try:
        return _row(job, store, skipped=True) if store.exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged: the run that meets it reports it


def _row(job: Job, store: Path, *, skipped: bool) -> Converted:
    facts = read_manifest(store)["settings"]["facts"]
    source = read_json(store / "zarr.json")["attributes"][PROVENANCE]["source"]["sha256"]
    return Converted(name=job.name, store=f"{job.name}.zarr", skipped=skipped, source=source, **facts)


class _Conversion:
    """The steps of converting one slide."""

    def __init__(
        self, job: Job, slide: Slide, out: Path, settings: Settings, header: Mapping[str, Any],
        threads: int, progress: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self._job, self._slide, self._out, self._settings = job, slide, out, settings
        self._header, self._threads, self._progress = header, threads, progress
        self._store = out / f"{job.name}.zarr"
        self._staged = out / STAGING / f"{job.name}.zarr"
        self._source = slide.need_resolution()
        self._image = ScaledImage(slide, 1.0 if settings.mpp is None else slide.factors(settings.mpp))
        top, left = map(float, slide.origin)
        # The position of the store in the slide, by the pixels that were taken and not by the options.
        self._place = SlideTransform(
            slide.whole.shape, (top, left), self._image.scale, (self._source.y, self._source.x), slide.whole.bounds
        )
        self._resolution = self._source.coarser(*self._image.scale)
        self._shapes = pyramid(*self._image.shape, settings.levels)
        self._codec, self._paints = ZstdCodec(settings.compression), settings.background == "constant"
        self._mask: TissueMask | None = None

    def run(self, path: Path) -> None:
        """Does what the journal of this path does not have yet."""
        journal = Journal(path, self._header)
        if not journal.matches:
            shutil.rmtree(self._staged, ignore_errors=True)
        self._staged.mkdir(parents=True, exist_ok=True)
        drop_missing(self._staged, journal)
        mask, overview = find_mask(self._slide, self._image, self._resolution, self._settings, self._paints)
        self._mask = mask
        cut = mask if self._paints else None
        chunks = ChunkCutter(self._slide, self._image, self._settings.chunk, cut)
        with journal:
            PyramidWriter(
                self._staged, self._shapes, chunks.cut, journal, self._settings.layout, self._codec,
                threads=self._threads, progress=self._progress_pixels(journal),
            ).run()  # fmt: skip
            self._finish(journal, overview)

    def _progress_pixels(self, journal: Journal) -> Callable[[int], None]:
        total = self._shapes[0][0] * self._shapes[0][1]
        rows, columns = self._settings.layout.grid(*self._shapes[0])
        done = total * sum(key.startswith("0/") for key in journal.entries) // max(1, rows * columns)
        self._progress(done, total)

        def add(pixels: int) -> None:
            nonlocal done
            done += pixels
            self._progress(min(done, total), total)

        return add

    def _finish(self, journal: Journal, overview: Image.Image) -> None:
        """Metadata, label, manifest and thumbnail; then the store gets its name."""
        for level, shape in enumerate(self._shapes):
            metadata = image_array(shape, self._settings.layout, self._codec)
            write_json(self._staged / str(level) / "zarr.json", metadata)
        name = Path(self._job.name).name
        provenance = {**self._provenance(), **self._compared()}
        attributes = image_attributes(name, self._place, len(self._shapes), provenance)
        write_json(self._staged / "zarr.json", group(attributes))
        if self._mask is not None:
            labels = self._staged / "labels"
            write_label(labels, self._mask, self._place, self._shapes, self._settings.layout)
        settings = {"header": dict(self._header), "facts": self._facts()}
        write_manifest(self._staged, settings, {k: e for k, e in journal.entries.items() if e.sha256})
        thumbnail = self._out / THUMBNAILS / f"{self._job.name}.jpg"
        thumbnail.parent.mkdir(parents=True, exist_ok=True)
        draw_overview(overview, self._mask, thumbnail)
        if self._mask is not None and self._mask.found:
            draw_overlay(self._mask, thumbnail.with_suffix(OVERLAY))
        sync_tree(self._staged)
        put_in_place(self._out, self._job.name)
        sync_folder(self._store.parent)

    def _compared(self) -> dict[str, Any]:
        """Changes that were made to pixels on purpose; without any, boxes are read again from slide and store.

        Raises:
            SlideError: They differ.
        """
        changes = [*self._slide.info.changes]
        if not self._image.is_exact:
            changes.append(f"filtered to {self._settings.mpp} µm a pixel")
        elif self._image.level:
            changes.append(f"level {self._image.level} of the slide")
        if self._paints:
            changes.append("background painted in one colour")
        boxes = [] if changes else list(_boxes(self._shapes[0], self._settings.chunk))
        stored = StoredLevel(self._staged / "0", self._shapes[0], self._settings.layout, self._codec)
        for y, x, height, width in boxes:
            pixels = self._image.read(y, x, height, width)
            if not np.array_equal(stored.read(y, x, height, width), pixels.transpose(2, 0, 1)):
                shutil.rmtree(self._staged)  # the next run begins anew
                raise SlideError(
                    self._job.slide,
                    f"the store has other pixels than the slide, in {height} x {width} px from row {y}, column {x}: "
                    "the file changed while it was read, or the memory or disk is bad; run again",
                )
        compared = {"boxes": len(boxes), "pixels": sum(height * width for *_, height, width in boxes)}
        return {"exact": bool(boxes), "changes": changes, "compared": compared}

    def _facts(self) -> dict[str, Any]:
        notes = list(self._slide.info.notes)
        pixel = self._resolution
        if not pixel.is_square:
            notes.append(f"pixels are not square: {pixel.x:g} x {pixel.y:g} µm (width x height)")
        return {
            "height": self._shapes[0][0],
            "width": self._shapes[0][1],
            "mpp": round(pixel.mean, 6) if pixel.is_square else None,
            "levels": len(self._shapes),
            "tissue": None if self._mask is None else round(self._mask.share, 4),
            "lost": None if self._mask is None else round(self._mask.lost, 6),
            **({"rules": self._mask.shares()} if self._mask is not None and self._mask.found else {}),
            **({"note": "; ".join(notes)} if notes else {}),
        }

    def _provenance(self) -> dict[str, Any]:
        """Provenance of the store, without any name, label or free text of the source."""
        info, resolution, slide = self._slide.info, self._source, SlideId.of(self._job.slide)
        hashes = {"sha256": slide.sha256 or full_hash(self._job.slide), **({"hash": slide.hash} if slide.hash else {})}
        return {
            "version": __version__,
            "source": {**hashes, "vendor": info.vendor, **info.details},
            "reader": info.reader,
            "source_mpp": {"y": resolution.y, "x": resolution.x, "origin": resolution.origin},
            "source_shape": list(info.shape),
            "source_origin": list(self._slide.origin),
            KEY: self._place.record(),
            "power": info.power,
            "settings": dict(self._settings.record()),
            "tissue": None
            if self._mask is None
            else {
                "threshold": self._mask.threshold,
                "share": self._mask.share,
                "lost": self._mask.lost,
                **({"rules": self._mask.shares()} if self._mask.found else {}),
            },
        }


def _boxes(shape: tuple[int, int], size: int) -> Iterator[tuple[int, int, int, int]]:
    """Chunks of an image: its corners, and others that are drawn by lot, the same each time."""
    rows, columns = (-(-side // size) for side in shape)
    lot = np.random.Generator(np.random.Philox(key=[rows, columns]))
    cells = [(row, column) for row in (0, rows - 1) for column in (0, columns - 1)]
    cells += [(int(lot.integers(rows)), int(lot.integers(columns))) for _ in range(_COMPARED - len(cells))]
    for row, column in dict.fromkeys(cells):
        y, x = row * size, column * size
        yield y, x, min(size, shape[0] - y), min(size, shape[1] - x)


def put_in_place(out: Path, name: str) -> None:
    """Gives a finished store its name. One that has it is moved aside first, and removed when the new one is there.

    Where a run dies in between, the next one finds the new store and its journal complete, and does the rest.
    """
    store, staged = out / f"{name}.zarr", out / STAGING / f"{name}.zarr"
    aside = staged.with_name(f"{staged.name}.aside")
    store.parent.mkdir(parents=True, exist_ok=True)
    if store.exists() or store.is_symlink():
        remove(aside)
        os.replace(store, aside)
    os.replace(staged, store)
    remove(aside)
