"""A synthetic data set: patients, labels, sites and splits; slides, outlines of lesions and the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wsi_trainer.io.tables import write_table
from wsi_trainer.synthetic.pyramid import Pixels, write_pyramid
from wsi_trainer.synthetic.slide import Site, SlideSpec, SyntheticSlide

DEFAULT_SPLITS: Mapping[str, float] = {"train": 0.6, "val": 0.2, "test": 0.2}


@dataclass(frozen=True)
class Member:
    """One slide of the cohort."""

    slide: int
    patient: int
    label: int
    site: str
    split: str
    prefix: str = "slide"

    @property
    def name(self) -> str:
        return f"{self.prefix}_{self.slide:04d}"


def _patients(slides: int, rng: np.random.Generator) -> list[int]:
    """Numbers of slides of the patients: one to three each."""
    sizes: list[int] = []
    while (left := slides - sum(sizes)) > 0:
        sizes.append(min(left, 1 + int(rng.random() * 3) if slides > 6 else 1))
    return sizes


def _assign(sizes: Sequence[int], splits: Mapping[str, float]) -> list[str]:
    """A split for each patient: each goes where most slides are still missing, the largest first."""
    missing = {name: share * sum(sizes) for name, share in splits.items() if share > 0}
    result = [""] * len(sizes)
    for patient in sorted(range(len(sizes)), key=lambda p: -sizes[p]):
        split = max(missing, key=lambda name: missing[name])
        result[patient] = split
        missing[split] -= sizes[patient]
    return result


def make_cohort(
    slides: int, seed: int, splits: Mapping[str, float] = DEFAULT_SPLITS, *, positive: float = 0.5, name: str = "slide"
) -> list[Member]:
    """A share of the slides positive; a patient's slides share label and split; splits stratified by label."""
    total = sum(splits.values())
    if not splits or min(splits.values()) < 0 or abs(total - 1) > 1e-6:
        raise ValueError(f"splits {dict(splits)} must be shares that add up to 1, not to {total:g}")
    rng = np.random.Generator(np.random.Philox(key=[seed, 0xC0407]))
    rows: list[tuple[int, int, str, str]] = []
    patient = 0
    found = int(slides * positive)
    for label, count in ((0, slides - found), (1, found)):
        sizes = _patients(count, rng)
        for index, (size, split) in enumerate(zip(sizes, _assign(sizes, splits), strict=True)):
            rows += [(patient, label, "AB"[index % 2], split)] * size
            patient += 1
    # Neither the number of a slide nor that of a patient tells the label.
    order = rng.permutation(len(rows))
    names = rng.permutation(patient)
    return [
        Member(slide, int(names[rows[row][0]]), rows[row][1], rows[row][2], rows[row][3], name)
        for slide, row in enumerate(order)
    ]


def write_manifest(path: Path, members: Sequence[Member], folder: str, mpp: float) -> None:
    """The manifest CSV: paths relative to it, one slide a line."""
    rows = (
        [
            *(f"{folder}/{member.name}.tif", member.label, f"patient_{member.patient:04d}", member.site),
            *(member.split, mpp, f"lesions/{member.name}.geojson"),
        ]
        for member in members
    )
    write_table(path, ["slide", "label", "patient", "site", "split", "mpp", "regions"], rows, keep=True)


Progress = Callable[[int], None]


def write_slide(path: Path, spec: SlideSpec, *, quality: int = 88, threads: int = 1, finer: int = 1,
                progress: Progress = lambda pixels: None) -> SyntheticSlide:  # fmt: skip
    """Writes one slide as a pyramidal JPEG TIFF; memory does not grow with its height.

    Args:
        path: the file; one that ends in ``.svs`` says of itself what a scanner of Aperio says.
        spec: the slide.
        finer: pixels of the file along one of the slide's, as of a scanner of higher resolution.
    """
    slide = SyntheticSlide(spec)

    def scanned(y: int, x: int, height: int, width: int) -> Pixels:
        if finer == 1:  # as it is: of one colour it is stored as one pixel, and encoded once
            return slide.render(y, x, height, width)
        top, left = y // finer, x // finer
        coarse = slide.render(top, left, -(-(y + height) // finer) - top, -(-(x + width) // finer) - left)
        fine = coarse.repeat(finer, axis=0).repeat(finer, axis=1)
        return fine[y - finer * top :, x - finer * left :][:height, :width]

    shape = (finer * spec.height, finer * spec.width)
    write_pyramid(path, scanned, shape, mpp=spec.mpp / finer, quality=quality, threads=threads, progress=progress)
    return slide


def slide_shape(side: int | tuple[int, int], seed: int, slide: int) -> tuple[int, int]:
    """Height and width: the longer side up to ``side``, the aspect from 0.65 to 1, lying or standing."""
    low, high = (int(0.8 * side), side) if isinstance(side, int) else side
    if not 64 <= low <= high:
        raise ValueError(f"side={side}: expected at least 64 px, the smaller number first")
    rng = np.random.Generator(np.random.Philox(key=[seed, (0x51DE << 32) + slide]))
    longer = low + int(rng.random() * (high - low + 1))
    shorter = max(64, int(longer * (0.65 + 0.35 * rng.random())))
    return (longer, shorter) if rng.random() < 0.5 else (shorter, longer)


def _write_sites(path: Path, kind: str, sites: list[Site], finer: int) -> None:
    """Regions as GeoJSON in full-resolution pixels."""
    features = [
        {
            "type": "Feature",
            "properties": {"classification": {"name": kind}},
            "geometry": {"type": "Polygon", "coordinates": [np.round(finer * site.polygon(), 2).tolist()]},
        }
        for site in sites
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def write_slides(
    out: Path,
    specs: Mapping[Member, SlideSpec],
    *,
    ending: str = ".tif",
    finer: int = 1,
    quality: int = 88,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda slides, pixels: None,
) -> None:
    """Writes ``slides/``, ``lesions/`` and ``decoys/`` of a data set."""
    workers = workers or os.cpu_count() or 1
    for folder in ("slides", "lesions", "decoys"):
        (out / folder).mkdir(parents=True, exist_ok=True)

    def write(member: Member) -> None:
        spec = specs[member]
        path = out / "slides" / f"{member.name}{ending}"
        threads = workers if len(specs) == 1 else 1
        slide = write_slide(
            path, spec, quality=quality, threads=threads, finer=finer, progress=lambda n: progress(0, n)
        )
        for kind, positive in (("lesion", True), ("decoy", False)):
            sites = slide.sites if spec.positive == positive else []
            _write_sites(out / f"{kind}s" / f"{member.name}.geojson", kind, sites, finer)
        progress(1, 0)

    with ThreadPoolExecutor(min(workers, len(specs))) as pool:
        list(pool.map(write, specs))


def generate(
    out: Path | str,
    slides: int = 40,
    side: int | tuple[int, int] = 2048,
    seed: int = 0,
    noise: bool = False,
    splits: Mapping[str, float] = DEFAULT_SPLITS,
    workers: int | None = None,
    *,
    shape: tuple[int, int] | None = None,
    mpp: float = 0.5,
    tissue: float = 0.4,
    contrast: float = 0.34,
    quality: int = 88,
    progress: Callable[[int, int], None] = lambda slides, pixels: None,
) -> Path:
    """Writes a data set of slides whose label shows at full resolution only.

    Args:
        out: the folder; it gets ``manifest.csv``, ``slides/`` and, as GeoJSON, ``lesions/`` of the positive
            slides and ``decoys/``: the same kind of places on the negative ones, where nuclei are normal.
        side: the longest side in pixels, or the smallest and the largest; sizes vary between slides.
        noise: scanner noise everywhere, also on background; without it background is one exact colour.
        splits: the share of each split; slides of a patient stay together.
        workers: threads; the default is one for each core.
        shape: height and width of every slide instead of ``side``.
        tissue: share of a slide that is tissue, about.
        contrast: how strong the chromatin of lesion nuclei is; smaller is harder.
        progress: called as slides and rows are finished, with the slides and the pixels added.

    Returns:
        The path of the manifest.
    """
    if slides < 1:
        raise ValueError(f"slides={slides}: expected one or more")
    out = Path(out)
    members = make_cohort(slides, seed, splits)
    specs = {
        member: SlideSpec(
            *(shape or slide_shape(side, seed, member.slide)), seed=seed, slide=member.slide, patient=member.patient,
            positive=bool(member.label), noise=noise, mpp=mpp, tissue=tissue, contrast=contrast,
        )
        for member in members
    }  # fmt: skip
    write_slides(out, specs, quality=quality, workers=workers, progress=progress)
    # Last, so that a manifest means a complete data set.
    manifest = out / "manifest.csv"
    write_manifest(manifest, members, "slides", mpp)
    return manifest
