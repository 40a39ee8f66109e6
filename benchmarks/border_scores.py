"""Borders and lesions of a whole slide, compared block by block, against each lesion by itself.

    python -m benchmarks.border_scores [--side 100000] [--lesions 400]

Lesions are drawn as outlines far from each other; what is found is the same, some pixels to the side. So the counts of
the slide have to be the sum of those of the lesions, each compared in a small image of its own.
Writes the side's case into benchmarks/results/border_scores.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.keep import keep_case
from lightning_plugin import Box
from tests.lightning_plugin.planner.peaks import CLEAR, of_status
from wsi_trainer.places import Place
from wsi_trainer.regions import DrawnSource, Legend, Region
from wsi_trainer.segment.borders import border_pixels
from wsi_trainer.segment.lesions import drawn_lesions

PIXEL = (0.25, 0.25)
TOLERANCE = 10.0
ROOM = 1400
"""Pixels of the image of one lesion."""


class Labels:
    """A source of classes, read as an array is."""

    def __init__(self, source: DrawnSource) -> None:
        self.source = source

    def __getitem__(self, where: tuple[slice, slice]) -> np.ndarray[Any, Any]:
        rows, columns = where
        return self.source.read(Box((rows.start, columns.start), (rows.stop, columns.stop)))[0, 0].numpy()


def outline(middle: tuple[float, float], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """A lesion of some hundred pixels with a border that goes in and out."""
    angles = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    waves = sum(random.normal(0, 12) * np.sin(k * angles + random.uniform(0, 6)) for k in range(2, 7))
    reach = random.uniform(250, 420) + waves
    return np.stack([middle[0] + reach * np.cos(angles), middle[1] + reach * np.sin(angles)], axis=1)


def source(rings: list[np.ndarray[Any, Any]], size: tuple[int, int]) -> DrawnSource:
    regions = [Region("lesion", (ring,)) for ring in rings]
    return DrawnSource.of(regions, Legend.of(("normal", "lesion"), None, None), Place(size), size, Path("made"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.border_scores", description=__doc__)
    parser.add_argument("--side", type=int, default=100_000)
    parser.add_argument("--lesions", type=int, default=400)
    options = parser.parse_args()
    random, size = np.random.default_rng(0), (options.side, options.side)
    cells = options.side // ROOM
    chosen = random.choice(cells * cells, min(options.lesions, cells * cells), replace=False)
    places = [((cell % cells) * ROOM, (cell // cells) * ROOM) for cell in chosen.tolist()]
    rings = [outline((x + ROOM / 2, y + ROOM / 2), random) for x, y in places]
    shifts = [random.uniform(-60, 60, 2) for _ in rings]
    drawn, found = source(rings, size), source([r + s for r, s in zip(rings, shifts, strict=True)], size)
    start = of_status("VmRSS")
    CLEAR.write_text("5")
    begin = time.process_time()
    counted = border_pixels(Labels(found), drawn, 2, PIXEL, TOLERANCE)
    seconds = time.process_time() - begin
    lesions = drawn_lesions(drawn, 2)[0]
    both = time.process_time() - begin
    memory = of_status("VmHWM") - start
    alone = np.zeros_like(counted)
    for (x, y), ring, shift in zip(places, rings, shifts, strict=True):
        room = (ROOM, ROOM)
        one, other = source([ring - (x, y)], room), source([ring - (x, y) + shift], room)
        alone += border_pixels(Labels(other), one, 2, PIXEL, TOLERANCE, side=ROOM)
    values = {
        "lesions": len(rings),
        "lesions_counted": len(lesions),
        "border_pixels": counted.tolist(),
        "equal_to_lesions_alone": bool((counted == alone).all()),
        "processor_seconds": round(seconds, 1),
        "processor_seconds_with_lesions": round(both, 1),
        "memory_bytes": memory,
    }
    print(values, flush=True)
    keep_case("border_scores", f"{options.side} x {options.side}, {len(rings)} lesions", values)


if __name__ == "__main__":
    main()
