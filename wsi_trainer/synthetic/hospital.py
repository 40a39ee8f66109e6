"""`hospital`: the slides of one hospital, which differ from another's, and a manifest with its records.

Laboratories stain differently, scanners differ in format and size of a pixel, and hospitals see other patients. What
shows a lesion is the same in all, so that a network of one hospital has something to say in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wsi_trainer.io.tables import write_table
from wsi_trainer.synthetic.cohort import Member, make_cohort, slide_shape, write_slides
from wsi_trainer.synthetic.slide import SlideSpec

RECORDS = ["slide", "label", "patient", "site", "age", "sex", "time", "event"]
FOLLOWED = 60.0
"""Months after which every patient is lost to follow-up, if not before."""
UNKNOWN = 12
"""The age of one patient in so many is not on record."""


def hospital(
    out: Path | str,
    name: str,
    slides: int = 40,
    side: int | tuple[int, int] = 512,
    seed: int = 0,
    *,
    positive: float = 0.5,
    stain: tuple[float, float] = (1.0, 1.0),
    scanner: str = "tiff",
    finer: int = 1,
    mpp: float = 0.5,
    tissue: float = 0.5,
    contrast: float = 0.34,
    workers: int | None = None,
) -> Path:
    """Write the slides of a hospital, and the manifest with age, sex, months under observation and death.

    The risk of death rises with a lesion, threefold, and with age, by a half in ten years; sex and age say nothing of
    the label.

    Args:
        out: The folder; it gets `manifest.csv`, `slides/`, `lesions/` and `decoys/`, as of `generate`.
        name: Name of the hospital, with which names of its slides and patients begin.
        slides: How many.
        side: Longest side of a slide at `mpp`, or the smallest and the largest.
        seed: Decides the slides and the records; two hospitals have two.
        positive: Share of the slides with a lesion.
        stain: Factors of the strength of haematoxylin and of eosin.
        scanner: `tiff`, or `aperio` for SVS.
        finer: Pixels of the scan along one of `mpp`.
        mpp: Micrometres per pixel at which nuclei have their usual size.
        tissue: Share of a slide that is tissue, about.
        contrast: How strong the chromatin of lesion nuclei is.
        workers: Threads; the default is one for each core.

    Returns:
        The path of the manifest.
    """
    if scanner not in ("tiff", "aperio"):
        raise ValueError(f"scanner={scanner!r}: expected 'tiff' or 'aperio'")
    if not (0 < positive < 1 and finer >= 1 and slides >= 2):
        raise ValueError(f"positive={positive}, finer={finer}, slides={slides}: expected a share, and at least 1 and 2")
    out, ending = Path(out), ".svs" if scanner == "aperio" else ".tif"
    members = make_cohort(slides, seed, {"train": 1.0}, positive=positive, name=name)
    specs = {}
    for member in members:
        height, width = slide_shape(side, seed, member.slide)
        specs[member] = SlideSpec(
            height, width, seed=seed, slide=member.slide, patient=member.patient, positive=bool(member.label),
            noise=True, mpp=mpp, tissue=tissue, contrast=contrast, stain=stain,
        )  # fmt: skip
    write_slides(out, specs, ending=ending, finer=finer, workers=workers)
    manifest = out / "manifest.csv"
    rows = [[f"slides/{m.name}{ending}", m.label, f"{name}_{m.patient:04d}", name, *_records(m, seed)] for m in members]
    write_table(manifest, RECORDS, rows, keep=True)
    return manifest


def _records(member: Member, seed: int) -> Sequence[object]:
    """Age, sex, months under observation and death of the patient."""
    rng = np.random.Generator(np.random.Philox(key=[seed, (0x4EC0 << 32) + member.patient]))
    age, woman, unknown = int(rng.integers(40, 86)), rng.random() < 0.5, rng.random() < 1 / UNKNOWN
    hazard = 0.012 * 3.0**member.label * 1.5 ** ((age - 63) / 10)
    death, lost = rng.exponential(1 / hazard), rng.uniform(6, FOLLOWED)
    return "" if unknown else age, "f" if woman else "m", round(max(0.1, min(death, lost)), 1), int(death <= lost)
