"""A map drawn over a small picture of its slide."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from PIL import Image, ImageDraw

from wsi_trainer.explain.attribution import Attribution
from wsi_trainer.explain.regions import Rings


def draw_overlay(
    picture: np.ndarray,
    attribution: Attribution,
    size: tuple[int, int],
    scale: float | None,
    regions: list[Rings] | None = None,
) -> Image.Image:
    """The picture, greyed, with what speaks for the class in colour, and outlines of regions.

    Args:
        picture: (rows, columns, 3) bytes.
        attribution: The map.
        size: Height and width of the slide that the picture shows.
        scale: The value that is drawn in full colour; one for all slides makes their pictures comparable. None draws
            percentiles of the slide's positive values, as weights of attention differ little from each other.
        regions: Annotated regions in pixels of the slide.
    """
    slide = Image.fromarray(picture)
    values = attribution.positive.float().numpy()
    values = percentiles(values) if scale is None else np.clip(values / max(scale, 1e-30), 0, 1)
    strength = _resized(values, attribution.stride, size, slide.size)
    colours = colormaps["inferno"](0.25 + 0.75 * strength)[..., :3]
    grey = np.asarray(slide.convert("L").convert("RGB"), dtype=np.float32) / 255
    weight = np.sqrt(strength)[..., None]
    mixed = Image.fromarray((255 * ((1 - weight) * (0.35 + 0.65 * grey) + weight * colours)).astype(np.uint8))
    shrink = slide.size[0] / size[1]
    for outline, *_ in regions or []:
        points = [(x * shrink, y * shrink) for x, y in [*outline, outline[0]]]
        ImageDraw.Draw(mixed).line(points, fill=(0, 190, 120), width=2)
    return mixed


def percentiles(values: np.ndarray) -> np.ndarray:
    """The share of positive values that are no larger, for each; 0 where there is none."""
    ordered = np.sort(values[values > 0])
    return np.searchsorted(ordered, values, side="right") / max(len(ordered), 1) * (values > 0)


def _resized(values: np.ndarray, stride: int, size: tuple[int, int], picture: tuple[int, int]) -> np.ndarray:
    """The map in the size of the picture. The last position may reach beyond the slide, or not to its end."""
    rows, columns = (-(-side // stride) for side in size)
    whole = np.pad(values, ((0, max(0, rows - values.shape[0])), (0, max(0, columns - values.shape[1]))))
    shown = (0.0, 0.0, size[1] / stride, size[0] / stride)
    return np.asarray(Image.fromarray(whole).resize(picture, Image.Resampling.BOX, box=shown))
