"""Answers to the page's requests, without HTTP: for the server and for the static copy."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.explain.maps import LabelFile
from wsi_trainer.explain.outputs import peaks
from wsi_trainer.io.files import finite
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.regions.shapes import outlines
from wsi_trainer.slide.cache import LoadingCache
from wsi_trainer.slide.formats.base import PLAIN, ReadOptions
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.view.contents import Contents, ShownSlide
from wsi_trainer.view.tiles import LAYER_TILE, TILE, BadNumber, LabelLayer, Layer, NotThere, TiledSlide, jpeg, png

OPEN = 8
"""Slides that stay open."""
MASKS = 64 << 20
"""Bytes of tissue masks that are kept."""
MOST_READ = 1 << 27
"""Pixels of a slide that are read to find its tissue."""
MOST_OUTLINED = 1 << 20
"""Positions of a map that outlines are drawn from; of a larger one its means are taken."""
MOST_TOP = 50
COLOURS = ("inferno", "viridis", "turbo", "coolwarm", "Greens")
"""matplotlib's colour maps that may be chosen."""
TISSUE = "tissue"


class Scene:
    """The slides and layers, opened when they are looked at.

    Args:
        contents: What may be looked at.
        options: What to take of slides that are more than one image of 8 bits.
        keep_open: How many slides stay open.
    """

    def __init__(self, contents: Contents, options: ReadOptions = PLAIN, keep_open: int = OPEN) -> None:
        self.contents = contents
        self.version = secrets.token_hex(4)
        self._options = options
        self._slides: LoadingCache[int, TiledSlide] = LoadingCache(self._open, lambda _: 1, keep_open)
        self._labels: LoadingCache[tuple[int, int], Layer] = LoadingCache(self._label_layer, lambda _: 1, keep_open)
        self._masks: LoadingCache[int, Layer] = LoadingCache(self._tissue, lambda mask: mask.values.nbytes, MASKS)

    def close(self) -> None:
        self._slides.clear()

    @property
    def opened(self) -> int:
        """Slides that are kept open. Others close when nobody reads them any more."""
        return self._slides.bytes

    def slide(self, slide: int) -> TiledSlide:
        """An open slide."""
        self._entry(slide)
        return self._slides.get(slide)

    def overview(self) -> dict[str, Any]:
        """Facts that the page starts from."""
        shown = self.contents
        return {
            "version": self.version,
            "title": shown.title,
            "runs": list(shown.runs),
            "error_means": shown.error_means,
            "tile": TILE,
            "layer_tile": LAYER_TILE,
            "colours": {name: _table(name) for name in COLOURS},
            "slides": [slide.row(number) for number, slide in enumerate(shown.slides)],
        }

    def about(self, slide: int) -> dict[str, Any]:
        """Facts by which the page shows a slide."""
        entry = self._entry(slide)
        opened = self.slide(slide)
        place = _place(opened)
        return {
            "width": opened.width,
            "height": opened.height,
            "depth": opened.depth,
            "coarsest": opened.coarsest,
            "finest": 0,
            "mpp": _mpp(opened),
            "place": {"origin": place.origin, "scale": place.scale},
            "notes": list(opened.info.notes),
            "layers": [self._about_map(slide, number) for number in range(len(entry.maps))],
            "regions": entry.regions is not None or entry.found is not None,
        }

    def tile(self, slide: int, level: int, row: int, column: int) -> bytes:
        """A tile as JPEG."""
        opened = self.slide(slide)
        return jpeg(opened.tile(level, row, column))

    def thumbnail(self, slide: int, side: int = 96) -> bytes:
        """A small picture of a slide as JPEG."""
        opened = self.slide(slide)
        return jpeg(opened.thumbnail(side))

    def region(self, slide: int, x: int, y: int, width: int, height: int) -> bytes:
        """A box at full resolution as PNG."""
        opened = self.slide(slide)
        return png(opened.region(x, y, width, height))

    def about_layer(self, slide: int, layer: str) -> dict[str, Any]:
        """Facts by which the page draws a layer; of tissue also why there is none."""
        try:
            return self.layer(slide, layer).about()
        except NotThere as error:
            if layer != TISSUE:
                raise
            return {"broken": str(error)}

    def numbers(self, slide: int, layer: str, level: int, row: int, column: int) -> bytes:
        """A tile of a layer: numbers of 4 bytes, the lowest byte first, row by row."""
        return self.layer(slide, layer).tile(level, row, column).astype("<f4").tobytes()

    def at(self, slide: int, layer: str, x: float, y: float) -> dict[str, Any]:
        """The value at a place, and its rank among all positions of the layer."""
        its = self.layer(slide, layer)
        row, column = its.position(x, y)
        value = float(its.values[row, column])
        box = [column * its.stride, row * its.stride, its.stride, its.stride]
        if its.classes:
            return {"value": value, "class": _named(its.classes, int(value)), "box": box}
        larger = int((np.asarray(its.values) > value).sum())
        return {
            "value": value if math.isfinite(value) else None,
            "rank": larger + 1,
            "of": int(its.values.size),
            "box": box,
        }

    def outlines(self, slide: int, layer: str, threshold: float) -> dict[str, Any]:
        """Polygons around what is above a share of the largest value, in pixels of level 0."""
        if not 0 < threshold < 1:
            raise BadNumber(f"threshold is {threshold:g}; it must be above 0 and below 1")
        opened = self.slide(slide)
        size = (opened.height, opened.width)
        its = self.layer(slide, layer)
        if its.classes:  # its regions are outlined by themselves
            return {"polygons": []}
        level = next(k for k in range(64) if its.values.size <= MOST_OUTLINED * 4**k)
        # One unit is a position of this level: what is drawn need not know that a slide was shrunk.
        unit = its.stride * 2**level
        extent = (math.ceil(size[0] / unit), math.ceil(size[1] / unit))
        found = outlines(its.level(level).astype(np.float64), 1, extent, threshold)
        polygons = [
            {"rings": [[[round(x * unit, 1), round(y * unit, 1)] for x, y in ring] for ring in outline.rings]}
            for outline in found
        ]
        return {"polygons": polygons}

    def top(self, slide: int, layer: str, count: int) -> dict[str, Any]:
        """The places with the largest values, none near another."""
        if not 1 <= count <= MOST_TOP:
            raise BadNumber(f"count is {count}; it must be 1 to {MOST_TOP}")
        its = self.layer(slide, layer)
        if its.classes:
            return {"places": []}
        side = max(1, round(256 / its.stride))
        values = np.asarray(its.values, dtype=np.float64)
        places = []
        for peak in peaks(values, 1, values.shape, side, count):
            y, x = ((at + 0.5) * its.stride for at in peak.at)
            places.append({"x": x, "y": y, "value": peak.value})
        return {"places": places}

    def regions(self, slide: int) -> dict[str, Any]:
        """The drawn and the found regions, which are in pixels of the original, in those of the image that is shown."""
        entry = self._entry(slide)
        place = _place(self.slide(slide))
        polygons = [
            {"kind": kind, "rings": [place.to_image(ring).tolist() for ring in region.rings]}
            for kind, path in (("drawn", entry.regions), ("found", entry.found))
            if path is not None
            for region in read_regions(path)
        ]
        return {"polygons": polygons}

    def layer(self, slide: int, name: str) -> Layer:
        """A layer of a slide: `tissue`, or the number of a map or of a label image."""
        entry = self._entry(slide)
        if name == TISSUE:
            return self._masks.get(slide)
        if name not in map(str, range(len(entry.maps))):
            raise NotThere(f"slide {entry.name} has no layer {name[:20]}; it has {len(entry.maps)} maps")
        found = entry.maps[int(name)]
        if isinstance(found, LabelFile):
            return self._labels.get((slide, int(name)))
        shown = _place(self.slide(slide))
        return Layer(found.load(), found.stride * found.place.scale[1] / shown.scale[1])

    def _label_layer(self, of: tuple[int, int]) -> Layer:
        slide, number = of
        found, opened = self._entry(slide).maps[number], self.slide(slide)
        assert isinstance(found, LabelFile)
        levels, place = found.load()
        stride = opened.width / levels[0].shape[1] if place is None else place.scale[1] / _place(opened).scale[1]
        return LabelLayer(levels[0], stride, found.classes, levels)

    def _entry(self, slide: int) -> ShownSlide:
        if not 0 <= slide < len(self.contents.slides):
            raise NotThere(f"there is no slide {slide}; there are {len(self.contents.slides)}")
        return self.contents.slides[slide]

    def _open(self, slide: int) -> TiledSlide:
        try:
            entry = self._entry(slide)
            return TiledSlide(Slide.open(entry.path, options=self._options, mpp=entry.mpp))
        except SlideError as error:
            raise NotThere(f"the slide cannot be read: {error.reason}") from error

    def _tissue(self, slide: int) -> Layer:
        """The mask that `preprocess` stored with a store, or would store."""
        opened = self.slide(slide)
        found = _tissue_of(opened)
        if not found.mask.any():
            raise NotThere("no tissue was found on this slide")
        return Layer(found.mask, float(found.scale))

    def _about_map(self, slide: int, number: int) -> dict[str, Any]:
        found = self._entry(slide).maps[number]
        about = {"title": found.title, "run": found.run}
        try:
            return {**about, **self.layer(slide, str(number)).about()}
        except (UserError, OSError) as error:
            return {**about, "broken": str(error)}


def _named(classes: Sequence[str], number: int) -> str:
    return classes[number] if number < len(classes) else str(number)


def _place(opened: TiledSlide) -> SlideTransform:
    """Position of level 0 of the shown image in the slide that it was made from."""
    try:
        return opened.slide.transform
    except SlideError as error:
        raise NotThere(error.reason) from error


def _tissue_of(opened: TiledSlide) -> TissueMask:
    slide = opened.slide
    if not slide.stored and opened.coarsest < opened.depth and opened.width * opened.height > MOST_READ:
        raise NotThere("this slide has no coarse level: all of it would be read to find its tissue")
    try:
        return slide.tissue()
    except SlideError as error:
        raise NotThere(error.reason) from error


def _mpp(opened: TiledSlide) -> list[float] | None:
    """Micrometres per pixel, y and x, where a plausible size is known."""
    found = opened.slide.resolution
    return None if found is None else [found.y, found.x]


def _table(name: str) -> list[int]:
    """A colour map as 256 colours, each red, green and blue."""
    colours: list[int] = (colormaps[name](np.arange(256))[:, :3] * 255).round().astype(int).reshape(-1).tolist()
    return colours


def to_json(content: Mapping[str, Any] | str) -> bytes:
    """JSON as browsers read it, which know no NaN."""
    return json.dumps(finite(content), allow_nan=False, separators=(",", ":")).encode()
