"""Who the slides belong to: patients, labels, sites and splits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wsi_trainer.io.tables import write_table

DEFAULT_SPLITS: Mapping[str, float] = {"train": 0.6, "val": 0.2, "test": 0.2}


@dataclass(frozen=True)
class Member:
    """One slide of the cohort."""

    slide: int
    patient: int
    label: int
    site: str
    split: str

    @property
    def name(self) -> str:
        return f"slide_{self.slide:04d}"


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


def make_cohort(slides: int, seed: int, splits: Mapping[str, float] = DEFAULT_SPLITS) -> list[Member]:
    """Half of the slides positive; a patient's slides share label and split; splits stratified by label."""
    total = sum(splits.values())
    if not splits or min(splits.values()) < 0 or abs(total - 1) > 1e-6:
        raise ValueError(f"splits {dict(splits)} must be shares that add up to 1, not to {total:g}")
    rng = np.random.Generator(np.random.Philox(key=[seed, 0xC0407]))
    rows: list[tuple[int, int, str, str]] = []
    patient = 0
    for label, count in ((0, slides - slides // 2), (1, slides // 2)):
        sizes = _patients(count, rng)
        for index, (size, split) in enumerate(zip(sizes, _assign(sizes, splits), strict=True)):
            rows += [(patient, label, "AB"[index % 2], split)] * size
            patient += 1
    # Neither the number of a slide nor that of a patient tells the label.
    order = rng.permutation(len(rows))
    names = rng.permutation(patient)
    return [
        Member(slide, int(names[rows[row][0]]), rows[row][1], rows[row][2], rows[row][3])
        for slide, row in enumerate(order)
    ]


def write_manifest(path: Path, members: Sequence[Member], folder: str, mpp: float) -> None:
    """The manifest CSV: paths relative to it, one slide a line."""
    partial = path.with_name(path.name + ".part")
    rows = (
        [
            *(f"{folder}/{member.name}.tif", member.label, f"patient_{member.patient:04d}", member.site),
            *(member.split, mpp, f"lesions/{member.name}.geojson"),
        ]
        for member in members
    )
    write_table(partial, ["slide", "label", "patient", "site", "split", "mpp", "regions"], rows, keep=True)
    os.replace(partial, path)
