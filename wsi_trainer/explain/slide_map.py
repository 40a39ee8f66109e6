"""The map of one slide, and its files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import METHODS, Attribution, Method
from wsi_trainer.explain.outputs import (
    Peak,
    crop,
    draw_overlay,
    peaks,
    positions_with_tissue,
    shares_inside,
    sheet,
    tiles,
    with_bar,
)
from wsi_trainer.explain.tables import SUFFIXES, Kind, PatchTable, kinds_of
from wsi_trainer.io.arrays import load_array
from wsi_trainer.io.files import save_array, save_picture
from wsi_trainer.regions.geojson import PathClass, objects_of, write_objects
from wsi_trainer.regions.ngff import write_map
from wsi_trainer.regions.outlines import Region
from wsi_trainer.regions.shapes import Outline, Rings, outlines
from wsi_trainer.slide.formats.base import FILL
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store.convert import NGFF04

NGFF: Mapping[str, tuple[str, ...]] = {
    "both": ("0.5", "0.4"), "all": ("0.5", "0.4", "0.6"), **{one: (one,) for one in ("0.6", "0.5", "0.4")},
}  # fmt: skip
"""The versions for each choice of `ngff`."""


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """The options of `wsi-train heatmap`."""

    method: Method = "activation"
    """activation: gradient × activation of the features before the head; attention: the weights of an attention head;
    gradient: gradient × (pixel − background), summed over each position; integrated: integrated gradients from there.
    """
    target: str | None = None
    """The class that the maps speak for; by default the positive or highest one of two or of an order, else the
    first.
    """
    steps: int = 16
    """Steps from background to the slide, of integrated gradients; each is a forward and a backward pass."""
    threshold: float = 0.5
    """The level of outlines in the GeoJSON file, as a share of the slide's largest value."""
    top: int = 3
    """Number of regions with the largest values that are cropped as PNG, beside a sheet of all; 0 for none. Of a run on
    features a region is a patch.
    """
    size: int = 512
    """Side of a cropped region, in pixels of the slide as the model sees it; of a run on features that of a patch."""
    tiles: int = 20000
    """At most how many tiles with measurements the GeoJSON of tiles has, for QuPath's measurement maps; where a map has
    more positions with tissue, a tile is several of them. 0 for none.
    """
    ngff: Literal["both", "all", "0.6", "0.5", "0.4"] = "both"
    """Versions of OME-Zarr that the layer is written in: QuPath reads 0.4, newer software 0.5; 0.6 has the pixels of
    the slide as a coordinate system too. both is the first two.
    """
    dicom: bool = False
    """Also write a Parametric Map, a Segmentation and bulk annotations for slides that are DICOM (needs highdicom: the
    extra dicom). They carry the patient's data that the slide's own files have.
    """
    tables: Kind = "none"
    """Also write the patches of each slide as a table, with features, contribution, attention and prediction: anndata
    (the extra anndata), spatialdata with the patches as squares (the extra spatial), or both.
    """
    originals: Path | None = None
    """Folder of the slides from which stores were made, where training used stores: DICOM results refer to these, and
    the QuPath script opens them.
    """

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"--method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if not 0 < self.threshold < 1:
            raise UserError(f"--threshold is {self.threshold}; it must be above 0 and below 1")
        if self.ngff not in NGFF:
            raise UserError(f"--ngff is {self.ngff!r}; it must be one of {', '.join(NGFF)}")
        kinds_of(self.tables)
        for name, least in (("steps", 1), ("top", 0), ("size", 1), ("tiles", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be {least} or more")


OVERLAY = 512
"""Longest side of an overlay."""
DICOM = "dicom"
"""Folder of the DICOM files, one folder for each slide."""
TILES = "tiles"
"""Folder of the GeoJSON files with tiles."""
TABLES = "tables"
"""Folder of the tables of patches."""
LAYERS = {"0.5": "", "0.4": f"{NGFF04}/", "0.6": "ngff-0.6/"}
"""Folders of the layers in each version of NGFF."""


@dataclass(frozen=True)
class MapFiles:
    """Files of a map, and the values and outlines in them."""

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
    """Position in the original slide of the image that the model saw."""
    stride: int
    name: str
    """The name of its files; see `result_names`."""

    @property
    def array(self) -> Path:
        return self.folder / f"{self.name}.npy"

    def load(self) -> Attribution:
        """The map as it was written."""
        return Attribution(torch.from_numpy(np.array(load_array(self.array))), self.stride)

    def write(
        self, values: Tensor, source: Image | None, options: MapOptions, target: PathClass,
        best: Sequence[Peak] | None = None, wanted: NDArray[np.bool_] | None = None,
    ) -> MapFiles:  # fmt: skip
        """Write everything but the overlay, which needs the maps of all slides; returns what was written.

        Args:
            values: The map.
            source: The pixels; None where the slide is absent.
            options: What is written.
            target: The class.
            best: Its top regions; by default squares around the largest values.
            wanted: The positions that tiles are of; by default those with tissue.
        """
        self._remove_earlier()
        single = values.float().cpu().numpy()
        save_array(single, self.array)
        facts = {"slide": self.record.slide, "method": options.method, "target": target.name, "stride": self.stride}
        double = single.astype(np.float64)
        found = outlines(double, self.stride, self.size, options.threshold)
        if best is None:
            best = peaks(double, self.stride, self.size, options.size, options.top)
        seed = "/".join(map(str, facts.values()))
        entry = {
            "array": self.array.name,
            **self._layers(single, options, facts),
            "outlines": f"{self.name}.geojson",
            "outlined_regions": len(found),
            **self._top(source, best),
            "place": self.place.record(),
            "stride": self.stride,
        }
        write_objects(self.folder / entry["outlines"], objects_of(found, target), self.place, seed)
        if options.tiles:
            path = self.folder / TILES / f"{self.name}.geojson"
            path.parent.mkdir(exist_ok=True)
            if wanted is None:
                assert source is not None
                wanted = positions_with_tissue(source, self.stride, (single.shape[0], single.shape[1]))
            cut = tiles(double, self.stride, self.size, wanted, options.tiles)
            entry |= {
                "tiles": f"{TILES}/{path.name}",
                "tiles_count": write_objects(path, cut, self.place, seed, tiles=True),
            }
        return MapFiles(entry, single, found)

    def _remove_earlier(self) -> None:
        """Take away what is only written where it is asked for: it would be of another map than the rest."""
        for name in (f"{TILES}/{self.name}.geojson", f"{self.name}-top-all.png", f"{TABLES}/{self.name}.h5ad"):
            (self.folder / name).unlink(missing_ok=True)
        kinds = [*(f"{place}{self.name}.ome.zarr" for place in LAYERS.values()), f"{DICOM}/{self.name}"]
        for name in (*kinds, f"{TABLES}/{self.name}{SUFFIXES['spatialdata']}"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def write_tables(self, table: PatchTable, kinds: Sequence[str]) -> dict[str, str]:
        """Write the patches as tables; returns their names by kind."""
        names = {kind: f"{TABLES}/{self.name}{SUFFIXES[kind]}" for kind in kinds}
        (self.folder / TABLES).mkdir(exist_ok=True)
        for kind, name in names.items():
            table.write(self.folder / name, kind)
        return names

    def _layers(self, values: NDArray[np.float32], options: MapOptions, facts: dict[str, Any]) -> dict[str, Any]:
        """The map in each version of NGFF that is wanted."""
        names = {version: f"{LAYERS[version]}{self.name}.ome.zarr" for version in NGFF[options.ngff]}
        for version, name in names.items():
            write_map(self.folder / name, values, self.place.coarser(self.stride), facts, version)
        return {"layer": next(iter(names.values())), "layers": names}

    def _top(self, source: Image | None, best: Sequence[Peak]) -> dict[str, Any]:
        """Pictures of the top regions and a sheet of them, where there are pixels, and their places in the slide."""
        found, pictures = [], []
        for number, peak in enumerate(best, start=1):
            corners = self.place.to_slide([peak.lo[::-1], peak.hi[::-1]])
            (left, top), (right, bottom) = np.rint(np.clip(corners, 0, self.place.shape[::-1])).astype(int).tolist()
            entry = {"value": peak.value, "x": left, "y": top, "width": right - left, "height": bottom - top}
            if source is not None:
                pictures.append(crop(source, Box(peak.lo, peak.hi)))
                entry = {"picture": f"{self.name}-top-{number}.png", **entry}
                save_picture(pictures[-1], self.folder / entry["picture"], "PNG")
            found.append(entry)
        if not pictures:
            return {"top": found}
        name = f"{self.name}-top-all.png"
        save_picture(sheet(pictures, [peak.value for peak in best]), self.folder / name, "PNG")
        return {"top": found, "sheet": name}

    def in_image(self, regions: Sequence[Region]) -> list[Rings]:
        """Regions, which are drawn on the original slide, in pixels of the image."""
        return [[self.place.to_image(ring) for ring in region.rings] for region in regions]

    def overlay(self, scale: float | None, regions: Sequence[Region], field: int) -> dict[str, Any]:
        """Draw the overlay; returns its name, and the shares of the map in the true regions where there are any."""
        attribution, scaled = self.load(), self.in_image(regions)
        drawn = with_bar(draw_overlay(self._thumbnail(), attribution, self.size, scale, scaled), scale)
        save_picture(drawn, self.folder / f"{self.name}.png", "PNG")
        entry: dict[str, Any] = {"picture": f"{self.name}.png"}
        if scaled:
            shares = shares_inside(attribution, scaled, field)
            entry |= {"mass_inside": shares.mass, "area_inside": shares.area}
        return entry

    def _thumbnail(self) -> NDArray[np.uint8]:
        """The slide as a small picture, which is white where the slide is absent."""
        if self.record.path.exists():
            with Slide.open(self.record.path) as slide:
                return slide.thumbnail(OVERLAY)
        shrink = OVERLAY / max(self.size)
        height, width = (max(1, round(side * shrink)) for side in self.size)
        return np.full((height, width, 3), FILL, np.uint8)
