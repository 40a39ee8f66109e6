"""Opening the image of a slide as a source, at full resolution or shrunk."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.errors import UserError
from wsi_trainer.slides.blocks import is_own_store
from wsi_trainer.slides.source import SlideSource


def open_image(path: Path, downsample: int = 1, source_mpp: float | None = None) -> SlideSource:
    """The image of a slide or of a store, shrunk by `downsample` in each direction.

    Args:
        path: The slide or the store.
        downsample: How much it is shrunk.
        source_mpp: Micrometres per pixel of a slide, where its file does not say it or says it wrong. A store says
            what preprocess settled.
    """
    full = SlideSource(path, source_mpp=source_mpp)
    if downsample == 1:
        return full
    full.close()
    if is_own_store(path):
        source_mpp = None
    if full.mpp is None and source_mpp is None:
        raise UserError(
            f"{path} does not say how large its pixels are, so it cannot be shrunk by {downsample}; "
            "fill in the column mpp of the manifest, or convert it with `wsi-train preprocess --source_mpp` first"
        )
    own = source_mpp or sum(full.mpp or ()) / 2
    return SlideSource(path, mpp=downsample * own, source_mpp=source_mpp)


def dense(source: TileSource) -> Tensor:
    """All pixels of a source. It holds the whole image: for thumbnails, and for slides that fit."""
    count = getattr(source, "instances", None) or 0
    return source.read(Box.whole((*source.shape[:count], *source.shape[max(count, 1) + 1 :])))
