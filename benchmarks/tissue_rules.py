"""The rules beside the tissue mask against known places: artefacts drawn onto real and synthetic tissue, hand labels.

    python -m benchmarks.tissue_rules --slides FOLDER

FOLDER has the slides of `datasets/tissue`; what is not there is left out, and said. Precision counts what a rule takes
within 50 µm of a true place as right, since rules take a margin; recall is of the true places that the mask holds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from PIL import Image
from rich.console import Console
from scipy.ndimage import binary_dilation

from benchmarks.view import sparse_slide
from wsi_trainer.fit.environment import environment
from wsi_trainer.slides.overview import find_mask
from wsi_trainer.slides.readers import Reader, open_reader
from wsi_trainer.slides.resample import ScaledImage
from wsi_trainer.slides.rules.choice import Rules
from wsi_trainer.slides.rules.table import ROWS
from wsi_trainer.slides.settings import Settings
from wsi_trainer.slides.tissue import TissueMask
from wsi_trainer.synthetic import SlideSpec, SyntheticSlide
from wsi_trainer.synthetic.artefacts import Artefact, Render, Spoilt, blur, fold, ink, pale, rim, ring, stroke
from wsi_trainer.synthetic.pyramid import write_pyramid

RESULT = Path(__file__).parent / "results" / "tissue_rules.json"
LABELS = Path(__file__).parents[1] / "datasets" / "tissue"
HE, DAPI = "CMU-1-Small-Region", "test3-DAPI-2-(387)"
TOLERANCE = 50.0  # µm
ALL = Rules(tuple(row.kind() for row in ROWS))
SIDE = 3072


def drawn_on(side: tuple[int, int], glass: np.ndarray, unit: float) -> list[Artefact]:
    """One of each kind, `unit` pixels to the width of a pen; none lies over another."""
    height, width = side
    at = lambda y, x: (x * width, y * height)  # noqa: E731
    return [
        ink(stroke([at(0.02, 0.05), at(0.3, 0.3)], unit), "blue"),
        ink(stroke([at(0.02, 0.95), at(0.3, 0.75)], unit), "red"),
        ink(stroke([at(0.98, 0.05), at(0.75, 0.25)], unit), "black"),
        ink(ring(*at(0.85, 0.85), 0.1 * min(side), unit), "green"),
        blur(shapely.box(*at(0.35, 0.35), *at(0.5, 0.6)), 6),
        fold(stroke([at(0.55, 0.45), at(0.7, 0.6)], unit / 3), 40, glass),
        rim(stroke([at(0.62, 0), at(0.66, 1)], unit / 4)),
        pale(shapely.box(*at(0.7, 0.35), *at(0.85, 0.55)), glass, 0.15),
    ]


def write_spoilt(path: Path, render: Render, side: tuple[int, int], artefacts: Sequence[Artefact], mpp: float) -> None:
    """A slide with artefacts, as a JPEG pyramid."""
    whole = Spoilt(render, side, artefacts).render(0, 0, *side)
    write_pyramid(path, lambda y, x, h, w: whole[y : y + h, x : x + w], side, mpp=mpp, quality=90)


def mask_of(path: Path, mpp: float, rules: Rules) -> tuple[TissueMask, np.ndarray]:
    """The mask of a slide, and its pixels at that size."""
    with open_reader(path) as reader:
        mask, _ = find_mask(path, reader, ScaledImage(reader, 1.0), (mpp, mpp), Settings(rules=rules))
        assert mask is not None
        return mask, _small(reader, mask.scale, mask.mask.shape)


def _small(reader: Reader, scale: int, shape: tuple[int, ...]) -> np.ndarray:
    coarse = ScaledImage(reader, float(scale), smooth=False)
    return coarse.read(0, 0, shape[0], shape[1])


def inside(polygons: Sequence[shapely.Geometry], shape: tuple[int, ...], scale: int) -> np.ndarray:
    """The pixels of a mask whose centre lies in one of these, as shapely says."""
    rows, columns = (np.mgrid[: shape[0], : shape[1]] + 0.5) * scale
    parts = [shapely.contains_xy(polygon, columns, rows) for polygon in polygons]
    return np.logical_or.reduce([np.zeros(shape, bool), *parts])


def score(found: np.ndarray, truth: np.ndarray, margin: int) -> dict[str, float | int | None]:
    """Precision with a margin, recall without."""
    wide = binary_dilation(truth, iterations=margin) if truth.any() else truth
    return {
        "found": int(found.sum()),
        "true": int(truth.sum()),
        "precision": round(float((found & wide).sum() / found.sum()), 3) if found.any() else None,
        "recall": round(float((found & truth).sum() / truth.sum()), 3) if truth.any() else None,
    }


def against_drawn(path: Path, artefacts: Sequence[Artefact], mpp: float) -> tuple[dict[str, Any], Image.Image]:
    """The scores of all rules on a spoilt slide, and a picture: the slide, truth, and what was found."""
    mask, pixels = mask_of(path, mpp, ALL)
    plain, _ = mask_of(path, mpp, Rules())
    margin = round(TOLERANCE / (mpp * mask.scale))
    scores, panels = {}, [pixels.copy(), pixels.copy()]
    for row in ROWS:
        places = [one.outline for one in artefacts if one.rule == row.name]
        truth = inside(places, mask.mask.shape, mask.scale)
        held = truth & (~plain.mask if row.adds else plain.mask)
        scores[row.name] = score(mask.found[row.name], held, margin)
        for panel, here in zip(panels, (truth, mask.found[row.name])):
            panel[here] = (0.35 * panel[here] + 0.65 * np.array(row.colour)).astype(np.uint8)
    return scores, Image.fromarray(np.concatenate([pixels, *panels], axis=1))


def against_hand(path: Path, mpp: float, name: str) -> dict[str, object]:
    """The mask against what a person takes for tissue, and how much of that each rule alone takes out of it."""
    features = json.loads((LABELS / f"{name}.geojson").read_text())["features"]
    polygons = [shapely.geometry.shape(feature["geometry"]) for feature in features]
    plain, _ = mask_of(path, mpp, Rules())
    truth = inside(polygons, plain.mask.shape, plain.scale)
    margin = round(TOLERANCE / (mpp * plain.scale))
    taken = {}
    for row in ROWS:
        mask, _ = mask_of(path, mpp, Rules((row.kind(),)))
        if row.name in mask.found:
            taken[row.name] = round(float((mask.found[row.name] & truth).sum() / truth.sum()), 4)
    return {"mask": score(plain.mask, truth, margin), "taken_of_true_tissue": taken}


def large(path: Path) -> dict[str, float]:
    """Seconds of processor time for the mask of a large slide with a pyramid, after a first one."""
    if not path.is_file():
        sparse_slide(path, 100_000)
    seconds = {}
    for name, rules in (("warm-up", Rules()), ("mask", Rules()), ("mask and usual rules", USUAL)):
        with open_reader(path) as reader:
            begin = time.process_time()
            find_mask(path, reader, ScaledImage(reader, 1.0), (0.25, 0.25), Settings(rules=rules))
            seconds[name] = round(time.process_time() - begin, 2)
            side = reader.info.shape[0]
    return {"side": side, **{name: value for name, value in seconds.items() if name != "warm-up"}}


USUAL = replace(ALL, chosen=tuple(rule for rule, row in zip(ALL.chosen, ROWS) if row.usual))


def main() -> None:
    """Measure, and write the result and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slides", type=Path, help="folder of the slides of datasets/tissue")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of what was true and what was found")
    parser.add_argument("--large", type=Path, help="file of a large slide whose mask is timed; made if it is not there")
    options = parser.parse_args()
    console = Console()
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(3):
            made = SyntheticSlide(SlideSpec(SIDE, SIDE, seed=seed, noise=True, tissue=0.5))
            artefacts = drawn_on((SIDE, SIDE), made.glass, 220)
            write_spoilt(folder / f"{seed}.tif", made.render, (SIDE, SIDE), artefacts, 0.5)
            values[f"synthetic {seed}"], picture = against_drawn(folder / f"{seed}.tif", artefacts, 0.5)
            _save(picture, options.pictures, f"synthetic-{seed}")
        slide = next(options.slides.glob(f"{HE}.svs"), None) if options.slides else None
        if slide:
            with open_reader(slide) as reader:
                whole = reader.read(0, 0, 0, *reader.info.shape)
            side = (whole.shape[0], whole.shape[1])
            artefacts = drawn_on(side, np.array([243, 242, 243], np.uint8), 180)
            write_spoilt(folder / "real.tif", lambda y, x, h, w: whole[y : y + h, x : x + w], side, artefacts, 0.499)
            values["drawn on real tissue"], picture = against_drawn(folder / "real.tif", artefacts, 0.499)
            _save(picture, options.pictures, "real")
            values["by hand, H&E"] = against_hand(slide, 0.499, HE)
        dark = next((p for p in options.slides.iterdir() if p.name == f"{DAPI}.ndpi"), None) if options.slides else None
        if dark:
            values["by hand, DAPI"] = against_hand(dark, 0.2282, DAPI)
        if not (slide and dark):
            console.print("the real slides are not there: their rows are left out")
        if options.large:
            values["large"] = large(options.large)
    console.print_json(json.dumps(values))
    RESULT.write_text(
        json.dumps({"name": "tissue_rules", "environment": environment(), "values": values}, indent=2) + "\n"
    )


def _save(picture: Image.Image, folder: Path | None, name: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        times = max(1, 1500 // picture.width)
        picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST).save(
            folder / f"{name}.png", optimize=True
        )


if __name__ == "__main__":
    main()
