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
    scale: float,
    regions: list[Rings] | None = None,
) -> Image.Image:
    """The picture, greyed, with what speaks for the class in colour, and outlines of regions.

    Args:
        picture: (rows, columns, 3) bytes.
        attribution: The map.
        size: Height and width of the slide that the picture shows.
        scale: The value that is drawn in full colour; one for all slides makes their pictures comparable.
        regions: Annotated regions in pixels of the full resolution.
    """
    slide = Image.fromarray(picture)
    values = attribution.positive.float().numpy()
    covered = Image.fromarray(np.clip(values / max(scale, 1e-30), 0, 1)).resize(
        (round(values.shape[1] * attribution.stride), round(values.shape[0] * attribution.stride)),
        Image.Resampling.NEAREST,
    )
    strength = np.asarray(covered.crop((0, 0, size[1], size[0])).resize(slide.size, Image.Resampling.BILINEAR))
    colours = colormaps["inferno"](0.25 + 0.75 * strength)[..., :3]
    grey = np.asarray(slide.convert("L").convert("RGB"), dtype=np.float32) / 255
    weight = np.sqrt(np.clip(strength, 0, 1))[..., None]
    mixed = Image.fromarray((255 * ((1 - weight) * (0.35 + 0.65 * grey) + weight * colours)).astype(np.uint8))
    shrink = slide.size[0] / size[1]
    for outline, *_ in regions or []:
        points = [(x * shrink, y * shrink) for x, y in [*outline, outline[0]]]
        ImageDraw.Draw(mixed).line(points, fill=(0, 190, 120), width=2)
    return mixed
