"""Maps of all slides of a split: pictures, arrays, and the share that falls on annotated regions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from wsi_trainer.data import SlideRecord, dense, open_image, read_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import Attribution, attribute, receptive_field
from wsi_trainer.explain.overlay import draw_overlay
from wsi_trainer.explain.regions import Rings, read_regions, shares_inside
from wsi_trainer.fit.run_folder import RunFolder, write_json
from wsi_trainer.models import SlideClassifier

SIDE = 512


def write_heatmaps(
    model: SlideClassifier,
    folder: RunFolder,
    split: str,
    regions: Path | None = None,
    target: int = 1,
    downsample: int = 1,
) -> dict[str, Any]:
    """Write a picture and an array for each slide of the split; returns what is also in heatmaps.json.

    Args:
        model: The trained network.
        folder: The run, which says the slides and gets the maps.
        split: Which slides.
        regions: Folder with SLIDE.geojson, the true regions; without it shares are not computed.
        target: Index of the class that the maps speak for.
        downsample: How much the run shrinks its slides.
    """
    records = [record for record in read_manifest(folder.splits) if record.split == split]
    if not records:
        raise UserError(f"no slide is in the split {split}; the splits of this run are in {folder.splits}")
    folder.heatmaps.mkdir(parents=True, exist_ok=True)
    field = receptive_field(model.backbone)
    maps = {}
    for record in track(records, description="maps", transient=True):
        image = dense(open_image(record.path, downsample, record.mpp)).to(model.device)
        attribution = attribute(model, image, target)
        maps[record.slide] = _Map(
            record, attribution, _picture(image), _scaled(_regions_of(record, regions), downsample)
        )
    scale = max(float(one.attribution.values.max()) for one in maps.values())
    name = model.task.classes[target]
    entries = {slide: _write(one, folder, scale, field) for slide, one in maps.items()}
    found = [e for slide, e in entries.items() if maps[slide].record.label == name and "mass_inside" in e]
    facts: dict[str, Any] = {
        "class": name,
        "receptive_field": field,
        "annotated_slides": len(found),
        "slides": entries,
    }
    if found:
        facts |= {key: float(np.mean([entry[key] for entry in found])) for key in ("mass_inside", "area_inside")}
    write_json(folder.heatmaps / "heatmaps.json", facts)
    return facts


def sentence_on_regions(facts: dict[str, Any]) -> str:
    """What heatmaps.json says about the true regions, as a sentence; empty where none are known."""
    if not facts.get("annotated_slides"):
        return ""
    mass, area, field = facts["mass_inside"], facts["area_inside"], facts["receptive_field"]
    return (
        f"{mass:.0%} of what speaks for {facts['class']!r} lies in the true regions or within one receptive "
        f"field ({field} px) of them, which are {area:.0%} of the area (mean over "
        f"{facts['annotated_slides']} slides)"
    )


@dataclass(frozen=True)
class _Map:
    record: SlideRecord
    attribution: Attribution
    picture: tuple[np.ndarray, tuple[int, int]]
    """A small image of the slide, and the height and width of what it shows."""
    regions: list[Rings]


def _write(one: _Map, folder: RunFolder, scale: float, field: int) -> dict[str, Any]:
    name = one.record.slide.replace("/", "_")
    np.save(folder.heatmaps / f"{name}.npy", one.attribution.values.cpu().numpy())
    picture, size = one.picture
    overlay = draw_overlay(picture, one.attribution, size, scale, one.regions)
    overlay.save(folder.heatmaps / f"{name}.png")
    entry: dict[str, Any] = {"picture": f"{name}.png", "array": f"{name}.npy"}
    if one.regions:
        shares = shares_inside(one.attribution, one.regions, field)
        entry |= {"mass_inside": shares.mass, "area_inside": shares.area}
    return entry


def _picture(image: Tensor) -> tuple[np.ndarray, tuple[int, int]]:
    factor = max(1, -(-max(image.shape[2:]) // SIDE))
    small = functional.avg_pool2d(image.float(), factor)[0].permute(1, 2, 0).byte().cpu().numpy()
    return small, (small.shape[0] * factor, small.shape[1] * factor)


def _scaled(regions: list[Rings], downsample: int) -> list[Rings]:
    return [[[(x / downsample, y / downsample) for x, y in ring] for ring in rings] for rings in regions]


def _regions_of(record: SlideRecord, folder: Path | None) -> list[Rings]:
    if folder is None:
        return []
    path = folder / f"{Path(record.slide).stem}.geojson"
    return read_regions(path) if path.is_file() else []
