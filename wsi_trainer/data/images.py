"""Opening the image of a slide as a `TileSource`, at full resolution or shrunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import torch
from torch import Tensor

from lightning_plugin import Box, TensorSource, TileSource
from wsi_trainer.errors import UserError


def open_image(path: Path, downsample: int = 1) -> TileSource:
    """The image of a slide, shrunk by `downsample` in each direction."""
    try:
        slide = openslide.OpenSlide(str(path))
    except openslide.OpenSlideError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    with slide:
        width, height = slide.dimensions
        size = (max(1, width // downsample), max(1, height // downsample))
        image = (
            slide.read_region((0, 0), 0, slide.dimensions) if downsample == 1 else slide.get_thumbnail(size)
        )
        pixels = np.asarray(image.convert("RGB").resize(size) if image.size != size else image.convert("RGB"))
    return TensorSource(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].contiguous())


def dense(source: TileSource) -> Tensor:
    """All pixels of a source. It holds the whole image: for thumbnails, and for slides that fit."""
    return source.read(Box.whole(source.shape[2:]))
