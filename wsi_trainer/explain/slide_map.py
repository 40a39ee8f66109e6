"""The map of one slide, and all that is written of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_plugin import LazyImage
from wsi_trainer.data import SlideRecord
from wsi_trainer.explain.attribution import Attribution, attribute
from wsi_trainer.explain.layer import write_layer
from wsi_trainer.explain.options import MapOptions
from wsi_trainer.explain.outlines import outlines, write_outlines
from wsi_trainer.explain.overlay import draw_overlay
from wsi_trainer.explain.regions import Rings, shares_inside
from wsi_trainer.explain.thumbnail import coarsest, thumbnail
from wsi_trainer.explain.top import crop, peaks
from wsi_trainer.models import SlideBatch, SlideClassifier

SIDE = 512
"""Longest side of an overlay."""
LONGEST = 180
"""Bytes of a name; a file system takes 255, endings included."""


@dataclass(frozen=True)
class SlideMap:
    """Names of the files of one slide's map, and what is known of the slide."""

    folder: Path
    record: SlideRecord
    size: tuple[int, int]
    """Height and width of the slide as the model sees it."""
    mpp: tuple[float, float] | None
    downsample: int
    stride: int

    @property
    def name(self) -> str:
        """Another one for each slide: a folder in the slide's name stays apart from an underscore."""
        name = self.record.slide.replace("%", "%25").replace("/", "%2F")
        if len(name.encode()) <= LONGEST:
            return name
        seal = hashlib.sha256(name.encode()).hexdigest()[:16]
        return f"{name.encode()[:LONGEST].decode(errors='ignore')}-{seal}"

    @property
    def array(self) -> Path:
        return self.folder / f"{self.name}.npy"

    def load(self) -> Attribution:
        """The map as it was written."""
        return Attribution(torch.from_numpy(np.load(self.array)), self.stride)

    def write(self, values: torch.Tensor, batch: SlideBatch, options: MapOptions, target: str) -> dict[str, Any]:
        """Write everything but the overlay, which needs the maps of all slides; returns what was written."""
        single = values.float().cpu().numpy()
        np.save(self.array, single)
        facts = {"slide": self.record.slide, "method": options.method, "target": target, "stride": self.stride}
        write_layer(self.folder / f"{self.name}.ome.zarr", single, self.stride, self.mpp, facts)
        double = single.astype(np.float64)
        found = outlines(double, self.stride, self.size, options.threshold)
        write_outlines(self.folder / f"{self.name}.geojson", found, target, self.downsample)
        return {
            "array": self.array.name,
            "layer": f"{self.name}.ome.zarr",
            "outlines": f"{self.name}.geojson",
            "outlined_regions": len(found),
            "top": self._crops(double, batch, options),
        }

    def _crops(self, values: np.ndarray, batch: SlideBatch, options: MapOptions) -> list[dict[str, Any]]:
        image = batch["image"]
        assert isinstance(image, LazyImage)
        entries = []
        for number, peak in enumerate(peaks(values, self.stride, self.size, options.size, options.top), start=1):
            picture = f"{self.name}-top-{number}.png"
            crop(image.source, peak.box).save(self.folder / picture)
            (top, left), (height, width) = peak.box.lo, peak.box.extent
            at = {"x": left, "y": top, "width": width, "height": height}
            entries.append({"picture": picture, "value": peak.value} | {k: v * self.downsample for k, v in at.items()})
        return entries

    def overlay(self, scale: float, regions: list[Rings], field: int) -> dict[str, Any]:
        """Draw the overlay; returns its name, and the shares of the map in the true regions where there are any."""
        attribution = self.load()
        scaled = [[[(x / self.downsample, y / self.downsample) for x, y in r] for r in rings] for rings in regions]
        picture = thumbnail(coarsest(self.record.path, SIDE), SIDE)
        draw_overlay(picture, attribution, self.size, scale, scaled).save(self.folder / f"{self.name}.png")
        entry: dict[str, Any] = {"picture": f"{self.name}.png"}
        if scaled:
            shares = shares_inside(attribution, scaled, field)
            entry |= {"mass_inside": shares.mass, "area_inside": shares.area}
        return entry


def compute(
    model: SlideClassifier, batch: SlideBatch, options: MapOptions, target: int, budget: int | str
) -> Attribution:
    """The map of a slide within the budget."""
    return attribute(
        model,
        batch["image"].to(model.device),
        target,
        options.method,
        context=[image.to(model.device) for image in batch.get("context", ())],
        tissue=[counts.to(model.device) for counts in batch.get("tissue", ())],
        steps=options.steps,
        budget=budget,
    )
