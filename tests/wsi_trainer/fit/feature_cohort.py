"""A small cohort of features with the columns of several targets, some of them empty."""

from __future__ import annotations

import csv
from pathlib import Path

import h5py
import numpy as np

WIDTH, SLIDES = 6, 24
SPLIT = ["train"] * 14 + ["val"] * 4 + ["test"] * 6


def write_features(folder: Path) -> Path:
    """Features whose first column tells the tumour; a third of the grades and a fifth of the survivals are absent."""
    random = np.random.default_rng(0)
    (folder / "features").mkdir()
    rows = []
    for number in range(SLIDES):
        case = number // 2
        grade = "" if number % 3 == 2 else ("low", "mid", "high")[case % 3]
        time, event = ("", "") if number % 5 == 4 else (str(1 + case), str(int(case % 4 != 3)))
        rows.append([f"s{number}.svs", SPLIT[number], f"p{case}", number % 2, number % 2, grade, time, event])
        values = random.normal(size=(4 + number, WIDTH))
        values[:, 0] += number % 2
        with h5py.File(folder / "features" / f"s{number}.h5", "w") as file:
            file["features"] = values.astype(np.float32)
            file["coords"] = np.stack([np.arange(len(values)) * 64] * 2, axis=1)
    with (folder / "manifest.csv").open("w", newline="") as file:
        head = ["slide", "split", "patient", "label", "tumour", "grade", "time", "event"]
        csv.writer(file).writerows([head, *rows])
    return folder


def words(cohort: Path, out: Path, *more: str) -> list[str]:
    """The words of `fit` on these features."""
    return [
        f"--data.manifest={cohort / 'manifest.csv'}", f"--data.features={cohort / 'features'}",
        f"--model.backbone={{name: features, width: {WIDTH}}}", "--model.head=abmil", f"--out={out}",
        "--train.epochs=2", "--train.budget=null", "--train.resamples=20", "--train.accelerator=cpu",
        "--train.loggers=[csv]", *more,
    ]  # fmt: skip
