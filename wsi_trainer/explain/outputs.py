"""Results of a map: top regions, tiles for QuPath, shares in true regions, overlay, and the script that loads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image as Picture
from PIL import ImageDraw
from scipy.ndimage import binary_dilation

from wsi_trainer.io.files import write_text
from wsi_trainer.regions.geojson import PathObject, rectangle
from wsi_trainer.regions.shapes import Rings, mask_of
from wsi_trainer.slide.tissue import TissueMask, any_of

if TYPE_CHECKING:
    from lightning_plugin import Box, TileSource
    from wsi_trainer.explain.attribution import Attribution
    from wsi_trainer.slide.views import Image


@dataclass(frozen=True)
class Shares:
    """Shares of a map in the true regions or near them."""

    mass: float
    """Of what speaks for the class; NaN where nothing does."""
    area: float
    """Of the map's positions: the mass that a map without any aim would have there."""


def shares_inside(attribution: Attribution, regions: Sequence[Rings], margin: float) -> Shares:
    """The shares in the regions and within `margin` pixels of them."""
    values = attribution.positive.double().cpu().numpy()
    stride = attribution.stride
    mask = mask_of(regions, (values.shape[0], values.shape[1]), stride)
    steps = int(np.ceil(margin / stride))
    if steps and mask.any():
        reach = np.arange(-steps, steps + 1)
        mask = binary_dilation(mask, (reach[:, None] ** 2 + reach**2) * stride**2 <= margin**2)
    total = values.sum()
    return Shares(float(values[mask].sum() / total) if total else float("nan"), float(mask.mean()))


def sentence_on_regions(facts: dict[str, Any]) -> str:
    """Sentence about the shares in true regions of heatmaps.json; empty where none are known."""
    if facts.get("mass_inside") is None:
        return ""
    mass, area, field = facts["mass_inside"], facts["area_inside"], facts["receptive_field"]
    return (
        f"{100 * mass:.0f} % of the map's positive values for {facts['class']!r} lie in the true regions or within one "
        f"receptive field ({field} px) of them, which are {100 * area:.0f} % of the area (mean over "
        f"{facts['annotated_slides']} slides)"
    )


@dataclass(frozen=True)
class Peak:
    """A place where a map is large."""

    value: float
    at: tuple[int, int]
    """Row and column of its position in the map."""
    lo: tuple[int, ...]
    """First row and column of the square around it, in pixels of the image and inside it."""
    hi: tuple[int, ...]
    """Row and column behind its last."""


def peaks(values: NDArray[np.float64], stride: int, size: tuple[int, int], side: int, count: int) -> list[Peak]:
    """The positions with the largest positive values, no two of which are within a side of each other."""
    left = values.copy()
    found: list[Peak] = []
    near = -(-side // stride)
    while len(found) < count:
        row, column = (int(i) for i in np.unravel_index(left.argmax(), left.shape))
        if left[row, column] <= 0:
            break
        found.append(Peak(float(values[row, column]), (row, column), *_around((row, column), stride, size, side)))
        left[max(0, row - near + 1) : row + near, max(0, column - near + 1) : column + near] = -np.inf
    return found


def _around(
    position: tuple[int, ...], stride: int, size: tuple[int, int], side: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The corners of the square around a position, moved into the slide where it would leave it."""
    centres = [round((at + 0.5) * stride) for at in position]
    lo = tuple(max(0, min(centre - side // 2, whole - side)) for centre, whole in zip(centres, size, strict=True))
    return lo, tuple(min(start + side, whole) for start, whole in zip(lo, size, strict=True))


def crop(source: TileSource, box: Box) -> Picture.Image:
    """The pixels of a box as a picture."""
    return Picture.fromarray(source.read(box)[0].permute(1, 2, 0).numpy())


def positions_with_tissue(image: Image, stride: int, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Positions of a map with tissue; all of them where none is found."""
    tissue = image.tissue()
    return with_tissue(tissue, stride, shape, image.size) if tissue.mask.any() else np.ones(shape, dtype=bool)


def with_tissue(tissue: TissueMask, stride: int, shape: tuple[int, int], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The positions that have tissue in one pixel at least, from the mask as coarse as it is: an image is large.

    Args:
        tissue: The mask of an image.
        stride: Pixels of the image for one position.
        shape: Rows and columns of the map.
        size: Height and width of the image.
    """
    found = tissue.mask
    for axis in (0, 1):
        starts = np.arange(shape[axis]) * stride
        ends = np.minimum(starts + stride, size[axis])
        first = np.minimum(starts // tissue.scale, found.shape[axis] - 1)  # a mask may be a pixel short
        last = np.minimum(-(-ends // tissue.scale), found.shape[axis])
        sums = np.cumsum(found, axis=axis, dtype=np.int32)
        sums = np.concatenate([np.zeros_like(np.take(sums, [0], axis)), sums], axis)
        found = np.take(sums, last, axis) > np.take(sums, first, axis)
    return found


def side_of_tiles(wanted: NDArray[np.bool_], most: int) -> int:
    """Positions along a tile: 1, or as many as it takes to have no more than `most` tiles."""
    side = 1
    while int(any_of(wanted, side).sum()) > most:
        side += 1
    return side


def tiles(
    values: NDArray[np.float64], stride: int, size: tuple[int, int], wanted: NDArray[np.bool_], most: int
) -> Iterator[PathObject]:
    """The tiles of a map, row by row.

    Args:
        values: The map.
        stride: Pixels of the image for one position.
        size: Height and width of the image, which no tile leaves.
        wanted: The positions that count. A tile has at least one, and its numbers are of these only.
        most: How many tiles there may be; where a map has more positions, a tile is several of them a side.
    """
    side = side_of_tiles(wanted, most)
    largest = float(np.max(values, where=wanted, initial=0))
    for row, column in np.argwhere(any_of(wanted, side)).tolist():
        part = (slice(row * side, (row + 1) * side), slice(column * side, (column + 1) * side))
        inside = values[part][wanted[part]]
        measured = {"mean value": float(inside.mean()), "largest value": float(inside.max())}
        if largest > 0:
            measured["share of the largest"] = max(0.0, measured["largest value"] / largest)
        step = side * stride
        right, bottom = min((column + 1) * step, size[1]), min((row + 1) * step, size[0])
        yield PathObject(rectangle(column * step, row * step, right, bottom), measured)


def draw_overlay(
    picture: np.ndarray,
    attribution: Attribution,
    size: tuple[int, int],
    scale: float | None,
    regions: Sequence[Rings] = (),
) -> Picture.Image:
    """The picture, greyed, with what speaks for the class in colour, and outlines of regions.

    Args:
        picture: (rows, columns, 3) bytes.
        attribution: The map.
        size: Height and width of the slide that the picture shows.
        scale: The value that is drawn in full colour; one for all slides makes their pictures comparable. None draws
            percentiles of the slide's positive values, as weights of attention differ little from each other.
        regions: Annotated regions in pixels of the slide.
    """
    slide = Picture.fromarray(picture)
    values = attribution.positive.float().numpy()
    values = percentiles(values) if scale is None else np.clip(values / max(scale, 1e-30), 0, 1)
    strength = _resized(values, attribution.stride, size, slide.size)
    mixed = _coloured(np.asarray(slide.convert("L").convert("RGB"), dtype=np.float32) / 255, strength)
    shrink = slide.size[0] / size[1]
    for outline, *_ in regions:
        points = [(x * shrink, y * shrink) for x, y in [*outline, outline[0]]]
        ImageDraw.Draw(mixed).line(points, fill=(0, 190, 120), width=2)
    return mixed


def _coloured(grey: np.ndarray, strength: np.ndarray) -> Picture.Image:
    """A picture that is mixed with the colours of a map, from 0, which leaves it clear, to 1."""
    colours, weight = colormaps["inferno"](0.25 + 0.75 * strength)[..., :3], np.sqrt(strength)[..., None]
    return Picture.fromarray((255 * ((1 - weight) * (0.35 + 0.65 * grey) + weight * colours)).astype(np.uint8))


BAR = 28
"""Height of the bar of colours below an overlay."""


def with_bar(picture: Picture.Image, scale: float | None) -> Picture.Image:
    """An overlay above the bar of its colours, with what they stand for.

    Args:
        picture: The overlay.
        scale: The value in full colour; None where colours are percentiles.
    """
    width, height = picture.size
    whole = Picture.new("RGB", (width, height + BAR), "white")
    whole.paste(picture)
    strength = np.tile(np.linspace(0, 1, max(width - 8, 2)), (BAR - 18, 1))
    whole.paste(_coloured(np.ones((*strength.shape, 3), np.float32), strength), (4, height + 3))
    draw, end = ImageDraw.Draw(whole), "100th percentile" if scale is None else f"{scale:.3g}"
    draw.text((4, height + BAR - 14), "0", "black")
    draw.text((width - 4 - draw.textlength(end), height + BAR - 14), end, "black")
    return whole


SHEET_SIDE, SHEET_COLUMNS = 192, 4
"""Pixels along a side of a picture on a sheet, and how many stand in a row."""


def sheet(pictures: Sequence[Picture.Image], values: Sequence[float]) -> Picture.Image:
    """The pictures of regions in one, row by row, each with its rank and value below."""
    columns, line = min(len(pictures), SHEET_COLUMNS), SHEET_SIDE + 22
    rows = -(-len(pictures) // columns)
    whole = Picture.new("RGB", (columns * (SHEET_SIDE + 8), rows * line), "white")
    for number, (picture, value) in enumerate(zip(pictures, values, strict=True)):
        x, y = number % columns * (SHEET_SIDE + 8) + 4, number // columns * line + 4
        shrink = SHEET_SIDE / max(picture.size)
        shown = picture.resize((max(1, round(picture.width * shrink)), max(1, round(picture.height * shrink))))
        whole.paste(shown, (x, y))
        ImageDraw.Draw(whole).text((x, y + SHEET_SIDE + 3), f"{number + 1}: {value:.3g}", "black")
    return whole


def percentiles(values: np.ndarray) -> np.ndarray:
    """The share of positive values that are no larger, for each; 0 where there is none."""
    ordered = np.sort(values[values > 0])
    return np.searchsorted(ordered, values, side="right") / max(len(ordered), 1) * (values > 0)


def _resized(values: np.ndarray, stride: int, size: tuple[int, int], picture: tuple[int, int]) -> np.ndarray:
    """The map in the size of the picture. The last position may reach beyond the slide, or not to its end."""
    rows, columns = (-(-side // stride) for side in size)
    whole = np.pad(values, ((0, max(0, rows - values.shape[0])), (0, max(0, columns - values.shape[1]))))
    shown = (0.0, 0.0, size[1] / stride, size[0] / stride)
    return np.asarray(Picture.fromarray(whole).resize(picture, Picture.Resampling.BOX, box=shown))


NAME = "qupath.groovy"
_BLANK = "new File(FOLDER)"


def write_script(folder: Path) -> Path:
    """Put the script beside heatmaps.json, which it reads; it knows its folder, which QuPath would not tell it."""
    script = Path(__file__).with_name(NAME).read_text(encoding="utf-8")
    path = folder / NAME
    write_text(path, script.replace(_BLANK, f"new File({_quoted(str(folder.resolve()))})"))
    return path


def _quoted(text: str) -> str:
    """A string of Groovy; in single quotes a dollar is a dollar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
