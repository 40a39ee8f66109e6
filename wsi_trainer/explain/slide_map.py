"""The map of one slide, and all that is written of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_plugin import Box
from wsi_trainer.data import SlideRecord
from wsi_trainer.explain.attribution import Attribution, attribute
from wsi_trainer.explain.layer import write_layer
from wsi_trainer.explain.options import NGFF, MapOptions
from wsi_trainer.explain.outlines import Outline, objects_of, outlines
from wsi_trainer.explain.overlay import draw_overlay
from wsi_trainer.explain.regions import Rings, shares_inside
from wsi_trainer.explain.tiles import positions_with_tissue, tiles
from wsi_trainer.explain.top import Peak, crop, peaks
from wsi_trainer.foreign.arrays import load_array
from wsi_trainer.io.files import save_array, save_picture
from wsi_trainer.models import SlideBatch, SlideClassifier
from wsi_trainer.places.geojson import Objects, PathClass
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.slides.staging import NGFF04

SIDE = 512
"""Longest side of an overlay."""
DICOM = "dicom"
"""Folder of the DICOM files, one folder for each slide."""
TILES = "tiles"
"""Folder of the GeoJSON files with tiles."""
LAYERS = {"0.5": "", "0.4": f"{NGFF04}/"}
"""Where the layers in each version of NGFF are."""


@dataclass(frozen=True)
class MapFiles:
    """What was written of a map, and what it was written from."""

    entry: dict[str, Any]
    """The files and places of the slide, as heatmaps.json has them."""
    values: NDArray[np.float32]
    outlines: list[Outline]


@dataclass(frozen=True)
class SlideMap:
    """Names of the files of one slide's map, and what is known of the slide."""

    folder: Path
    record: SlideRecord
    size: tuple[int, int]
    """Height and width of the slide as the model sees it."""
    place: SlideTransform
    """Where in the original slide the model saw it."""
    stride: int
    name: str
    """The name of its files; see `result_names`."""

    @property
    def array(self) -> Path:
        return self.folder / f"{self.name}.npy"

    def load(self) -> Attribution:
        """The map as it was written."""
        return Attribution(torch.from_numpy(np.array(load_array(self.array))), self.stride)

    def write(self, values: torch.Tensor, source: Image, options: MapOptions, target: PathClass) -> MapFiles:
        """Write everything but the overlay, which needs the maps of all slides; returns what was written."""
        self._remove_earlier()
        single = values.float().cpu().numpy()
        save_array(single, self.array)
        facts = {"slide": self.record.slide, "method": options.method, "target": target.name, "stride": self.stride}
        double = single.astype(np.float64)
        found = outlines(double, self.stride, self.size, options.threshold)
        best = peaks(double, self.stride, self.size, options.size, options.top)
        seed = "/".join(map(str, facts.values()))
        entry = {
            "array": self.array.name,
            **self._layers(single, options, facts),
            "outlines": f"{self.name}.geojson",
            "outlined_regions": len(found),
            "top": [self._crop(source, peak, number) for number, peak in enumerate(best, start=1)],
            "place": self.place.record(),
            "stride": self.stride,
        }
        Objects("annotation", seed).write(self.folder / entry["outlines"], objects_of(found, target), self.place)
        if options.tiles:
            path = self.folder / TILES / f"{self.name}.geojson"
            path.parent.mkdir(exist_ok=True)
            wanted = positions_with_tissue(source, self.stride, (single.shape[0], single.shape[1]))
            cut = tiles(double, self.stride, self.size, wanted, options.tiles)
            entry |= {
                "tiles": f"{TILES}/{path.name}",
                "tiles_count": Objects("tile", seed).write(path, cut, self.place),
            }
        return MapFiles(entry, single, found)

    def _remove_earlier(self) -> None:
        """Take away what is only written where it is asked for: it would be of another map than the rest."""
        (self.folder / TILES / f"{self.name}.geojson").unlink(missing_ok=True)
        kinds = [*(f"{place}{self.name}.ome.zarr" for place in LAYERS.values()), f"{DICOM}/{self.name}"]
        for name in kinds:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _layers(self, values: NDArray[np.float32], options: MapOptions, facts: dict[str, Any]) -> dict[str, Any]:
        """The map in each version of NGFF that is wanted."""
        names = {version: f"{LAYERS[version]}{self.name}.ome.zarr" for version in NGFF[options.ngff]}
        for version, name in names.items():
            write_layer(self.folder / name, values, self.place.coarser(self.stride), facts, version)
        return {"layer": next(iter(names.values())), "layers": names}

    def _crop(self, source: Image, peak: Peak, number: int) -> dict[str, Any]:
        """A picture of a top region, and where it lies in the original slide."""
        picture = f"{self.name}-top-{number}.png"
        save_picture(crop(source, Box(peak.lo, peak.hi)), self.folder / picture, "PNG")
        corners = self.place.to_slide([peak.lo[::-1], peak.hi[::-1]])
        (left, top), (right, bottom) = np.rint(np.clip(corners, 0, self.place.shape[::-1])).astype(int).tolist()
        at = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        return {"picture": picture, "value": peak.value, **at}

    def in_image(self, regions: list[Rings]) -> list[Rings]:
        """Regions, which are drawn on the original slide, in pixels of the image."""
        return [[[(x, y) for x, y in self.place.to_image(ring).tolist()] for ring in rings] for rings in regions]

    def overlay(self, scale: float | None, regions: list[Rings], field: int) -> dict[str, Any]:
        """Draw the overlay; returns its name, and the shares of the map in the true regions where there are any."""
        attribution, scaled = self.load(), self.in_image(regions)
        with Slide.open(self.record.path) as slide:
            picture = slide.thumbnail(SIDE)
        drawn = draw_overlay(picture, attribution, self.size, scale, scaled)
        save_picture(drawn, self.folder / f"{self.name}.png", "PNG")
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
