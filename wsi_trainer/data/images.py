"""Opening the image of a slide as a source, at full resolution or shrunk."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.errors import UserError
from wsi_trainer.slides.blocks import is_own_store
from wsi_trainer.slides.source import SlideSource


def readers_of(given: int | None = None) -> int:
    """How many threads read and decode a slide: as many as were given, or by what computes.

    A processor decodes some 300 megapixels a second and computes a network on less than one, so two threads never wait
    long and take little from it. A GPU computes as fast as several processors decode; one is left for what feeds it.
    """
    if given is not None:
        return given
    return max(2, min(8, processors() - 1)) if torch.cuda.is_available() else 2


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_image(path: Path, downsample: int = 1, source_mpp: float | None = None, readers: int = 2) -> SlideSource:
    """The image of a slide or of a store, shrunk by `downsample` in each direction.

    Args:
        path: The slide or the store.
        downsample: How much it is shrunk.
        source_mpp: Micrometres per pixel of a slide, where its file does not say it or says it wrong. A store says
            what preprocess settled.
        readers: How many threads read it.
    """
    full = SlideSource(path, source_mpp=source_mpp, threads=readers)
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
    return SlideSource(path, mpp=downsample * own, source_mpp=source_mpp, threads=readers)


def dense(source: TileSource) -> Tensor:
    """All pixels of a source. It holds the whole image: for thumbnails, and for slides that fit."""
    count = getattr(source, "instances", None) or 0
    return source.read(Box.whole((*source.shape[:count], *source.shape[max(count, 1) + 1 :])))
