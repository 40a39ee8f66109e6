"""Opening the image of a slide as a source, at full resolution or shrunk."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.errors import UserError
from wsi_trainer.slides.source import SlideSource


def open_image(path: Path, downsample: int = 1) -> SlideSource:
    """The image of a slide or of a store, shrunk by `downsample` in each direction."""
    full = SlideSource(path)
    if downsample == 1:
        return full
    full.close()
    if full.mpp is None:
        raise UserError(
            f"{path} does not say how large its pixels are, so it cannot be shrunk by {downsample}; "
            "convert it with `wsi-train preprocess --source_mpp` first"
        )
    return SlideSource(path, mpp=downsample * sum(full.mpp) / 2)


def dense(source: TileSource) -> Tensor:
    """All pixels of a source. It holds the whole image: for thumbnails, and for slides that fit."""
    return source.read(Box.whole(source.shape[2:]))
